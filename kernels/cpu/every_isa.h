// Compiles EDGELLM_KERNEL, the name of a header, for every instruction set, each in a namespace of
// its own, and defines EDGELLM_CALL(f(x)), which calls the f of the one in use.
#include "isa.h"

namespace {

#ifdef EDGELLM_X86
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

#define EDGELLM_AVX2
#define LANES 8
#ifdef EDGELLM_HAS_AVXVNNI
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

EDGELLM_BEGIN_AVX2
namespace avx2 {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
EDGELLM_END
#undef EDGELLM_AVX2
#undef LANES
#endif

#define LANES 4
#ifdef EDGELLM_ARM
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

namespace scalar {
#include "vector.h"
#include "quantize.h"
#include "../hadamard/cpu.h"
#include EDGELLM_KERNEL
}
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
