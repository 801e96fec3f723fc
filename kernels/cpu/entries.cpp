// The entry points of the kernels that a step is made of, and of the step, for the instruction set in use.
#include "entries.h"

namespace {

const edgellm::Entries& entries() {
    switch (edgellm::current_isa()) {
#ifdef EDGELLM_X86
        case edgellm::Isa::AMX:
        case edgellm::Isa::AVX512: return edgellm::avx512_entries;
#ifdef EDGELLM_HAS_AVXVNNI
        case edgellm::Isa::AVXVNNI: return edgellm::avxvnni_entries;
#endif
        case edgellm::Isa::AVX2: return edgellm::avx2_entries;
#endif
#ifdef EDGELLM_ARM
        case edgellm::Isa::NEON: return edgellm::neon_entries;
#endif
        default: return edgellm::scalar_entries;
    }
}

}  // namespace

extern "C" {

#define EDGELLM_ENTRY(set, result, name, structure) \
    result edgellm_##name(const edgellm::structure* call) { return entries().name(*call); }
EDGELLM_EACH_ENTRY(EDGELLM_ENTRY, none)

double edgellm_bare_products(int32_t threads, int32_t turns) { return entries().bare_products(threads, turns); }

}  // extern "C"
