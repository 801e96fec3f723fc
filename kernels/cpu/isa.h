// The instruction sets that the kernels are compiled for.
//
// A kernel is written once, in vector types that the compiler splits as the target needs (GCC and
// clang vector extensions) and the few operations of vector.h. `every_isa.h` includes its source
// once for each instruction set, inside a namespace and between EDGELLM_BEGIN_x and EDGELLM_END.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#define EDGELLM_X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define EDGELLM_ARM 1
#include <arm_neon.h>
#endif

#define EDGELLM_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EDGELLM_TARGET(features) \
    EDGELLM_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EDGELLM_END EDGELLM_PRAGMA(clang attribute pop)
#else
#define EDGELLM_TARGET(features) \
    EDGELLM_PRAGMA(GCC push_options) EDGELLM_PRAGMA(GCC target(features))
#define EDGELLM_END EDGELLM_PRAGMA(GCC pop_options)
#endif

// AMX came to GCC with version 11 and to clang with 12, and Linux alone grants it. Kernels for AVX-512 may use
// it where the processor has it.
#if defined(EDGELLM_X86) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define EDGELLM_HAS_AMX 1
#define EDGELLM_AMX_FEATURES ",amx-tile,amx-int8"
#else
#define EDGELLM_AMX_FEATURES ""
#endif
#define EDGELLM_AVX512_FEATURES \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c" EDGELLM_AMX_FEATURES
#if defined(__clang__)
#define EDGELLM_BEGIN_AVX512 EDGELLM_TARGET(EDGELLM_AVX512_FEATURES)
#else
#define EDGELLM_BEGIN_AVX512 EDGELLM_TARGET(EDGELLM_AVX512_FEATURES ",prefer-vector-width=512")
#endif
#define EDGELLM_BEGIN_AVXVNNI EDGELLM_TARGET("avxvnni,avx2,fma,f16c")
#define EDGELLM_BEGIN_AVX2 EDGELLM_TARGET("avx2,fma,f16c")
#if defined(__clang__)
#define EDGELLM_BEGIN_NEON EDGELLM_TARGET("dotprod")
#else
#define EDGELLM_BEGIN_NEON EDGELLM_TARGET("arch=armv8.2-a+dotprod")
#endif

// AVX-VNNI came to GCC with version 11 and to clang with 12. A sanitizer's build, which takes
// minutes, leaves it out: its sums of products are all that differs from AVX2.
#if defined(EDGELLM_X86) && !defined(__SANITIZE_ADDRESS__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define EDGELLM_HAS_AVXVNNI 1
#endif

// Added up, the ones that a file is compiled for.
#define EDGELLM_FOR_AVX512 1
#define EDGELLM_FOR_AVXVNNI 2
#define EDGELLM_FOR_AVX2 4
#define EDGELLM_FOR_NEON 8
#define EDGELLM_FOR_SCALAR 16

namespace edgellm {

// In the order of preference. AVX512 means with VNNI, AMX that and tiles of 8-bit integers, AVX2 with FMA and
// F16C, NEON with dot products; SCALAR is whatever the compiler targets by default.
enum class Isa { AMX, AVX512, AVXVNNI, AVX2, NEON, SCALAR };

// The one in use: the best that the processor has, or what edgellm_set_isa asked for.
Isa current_isa();

}  // namespace edgellm
