// Compiles EDGELLM_KERNEL, the name of a header, for every instruction set, each in a namespace of
// its own, and defines EDGELLM_CALL(f(x)), which calls the f of the one in use. A file that defines EDGELLM_SETS
// has those alone.
#include "isa.h"

#ifndef EDGELLM_SETS
#define EDGELLM_SETS ~0
#endif

namespace {

#if defined(EDGELLM_X86) && EDGELLM_SETS & EDGELLM_FOR_AVX512
#define EDGELLM_VNNI512
#ifdef EDGELLM_HAS_AMX
#define EDGELLM_TILES
#endif
#define LANES 16
EDGELLM_BEGIN_AVX512
namespace avx512 {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
EDGELLM_END
#undef EDGELLM_VNNI512
#undef EDGELLM_TILES
#undef LANES
#endif

#ifdef EDGELLM_X86
#define EDGELLM_AVX2
#define LANES 8
#if defined(EDGELLM_HAS_AVXVNNI) && EDGELLM_SETS & EDGELLM_FOR_AVXVNNI
#define EDGELLM_VNNI256
EDGELLM_BEGIN_AVXVNNI
namespace avxvnni {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
EDGELLM_END
#undef EDGELLM_VNNI256
#endif

#if EDGELLM_SETS & EDGELLM_FOR_AVX2
EDGELLM_BEGIN_AVX2
namespace avx2 {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
EDGELLM_END
#endif
#undef EDGELLM_AVX2
#undef LANES
#endif

#define LANES 4
#if defined(EDGELLM_ARM) && EDGELLM_SETS & EDGELLM_FOR_NEON
#define EDGELLM_NEON
EDGELLM_BEGIN_NEON
namespace neon {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
EDGELLM_END
#undef EDGELLM_NEON
#endif

#if EDGELLM_SETS & EDGELLM_FOR_SCALAR
namespace scalar {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
#endif
#undef LANES

}  // namespace

#if defined(EDGELLM_HAS_AVXVNNI)
#define EDGELLM_CASE_AVXVNNI(call) case edgellm::Isa::AVXVNNI: return avxvnni::call;
#else
#define EDGELLM_CASE_AVXVNNI(call)
#endif
#if defined(EDGELLM_X86)
#define EDGELLM_CALL(call)                                \
    switch (edgellm::current_isa()) {                     \
        case edgellm::Isa::AMX:                           \
        case edgellm::Isa::AVX512: return avx512::call;   \
        EDGELLM_CASE_AVXVNNI(call)                        \
        case edgellm::Isa::AVX2: return avx2::call;       \
        default: return scalar::call;                     \
    }
#elif defined(EDGELLM_ARM)
#define EDGELLM_CALL(call) \
    return edgellm::current_isa() == edgellm::Isa::NEON ? neon::call : scalar::call;
#else
#define EDGELLM_CALL(call) return scalar::call;
#endif
