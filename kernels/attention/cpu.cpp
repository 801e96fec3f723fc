// Native chunk attention: one entry point, one version for each instruction set.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../cpu/isa.h"
#include "../cpu/threads.h"

namespace {

constexpr int BLOCK = 128;
// Rows that share one conversion of the keys and values: enough to pay for it, few enough that a
// chunk of 128 tokens gives each of a handful of cores some tasks.
constexpr int ROWS_PER_TASK = 96;

// Arguments of one call; the same fields, in the same order, as in native.py.
struct Call {
    const void *k, *v;               // [blocks, layers, kv_heads, BLOCK, head_dim] int8 or float
    const float *k_scale, *v_scale;  // [blocks, layers, kv_heads, BLOCK], null for float
    const int64_t* table;            // block ids of the sequence
    const float* q;                  // [tokens, heads, head_dim]
    float* out;                      // [tokens, heads, head_dim]
    int32_t layers, layer, kv_heads, heads, head_dim, tokens, start, window, threads;
    int32_t decode;  // see cpu.h
};

#ifdef EDGELLM_X86
#define LANES 16
#define COLUMNS 4
EDGELLM_BEGIN_AVX512
namespace avx512 {
#include "cpu.h"
}
EDGELLM_END
#undef LANES
#undef COLUMNS
#define LANES 8
#define COLUMNS 2
EDGELLM_BEGIN_AVX2
namespace avx2 {
#include "cpu.h"
}
EDGELLM_END
#undef LANES
#undef COLUMNS
#endif
#define LANES 4
#define COLUMNS 2
namespace base {
#include "cpu.h"
}

}  // namespace

extern "C" void edgellm_attend(const Call* call) {
    switch (edgellm::current_isa()) {
#ifdef EDGELLM_X86
        case edgellm::Isa::AVX512: return avx512::attend(*call);
        case edgellm::Isa::AVX2: return avx2::attend(*call);
#endif
        default: return base::attend(*call);
    }
}
