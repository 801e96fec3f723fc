// Which instruction sets the kernels are compiled for, and how one source serves all of them.
//
// A kernel is written once, in vector types of 16 floats that the compiler splits as the target
// needs (GCC and clang vector extensions). Its file includes the source once for each instruction
// set, inside a namespace and between EDGELLM_BEGIN_x / EDGELLM_END.
#pragma once

#define EDGELLM_PRAGMA(text) _Pragma(#text)

#if defined(__x86_64__) && defined(__clang__)
#define EDGELLM_X86 1
#define EDGELLM_BEGIN_AVX512 \
    EDGELLM_PRAGMA(clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function))
#define EDGELLM_BEGIN_AVX2 \
    EDGELLM_PRAGMA(clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function))
#define EDGELLM_END EDGELLM_PRAGMA(clang attribute pop)
#elif defined(__x86_64__)
#define EDGELLM_X86 1
#define EDGELLM_BEGIN_AVX512 \
    EDGELLM_PRAGMA(GCC push_options) \
    EDGELLM_PRAGMA(GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512"))
#define EDGELLM_BEGIN_AVX2 \
    EDGELLM_PRAGMA(GCC push_options) EDGELLM_PRAGMA(GCC target("avx2,fma"))
#define EDGELLM_END EDGELLM_PRAGMA(GCC pop_options)
#endif

namespace edgellm {

// In the order of preference; BASE is what the compiler targets by default: SSE2, NEON ...
enum class Isa { AVX512, AVX2, BASE };

// The one in use: the best that the processor has, or what edgellm_set_isa asked for.
Isa current_isa();

}  // namespace edgellm
