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

void edgellm_append(const edgellm::AppendCall* call) { entries().append(*call); }

void edgellm_seal(const edgellm::SealCall* call) { entries().seal(*call); }

void edgellm_append_latents(const edgellm::AppendLatentsCall* call) { entries().append_latents(*call); }

void edgellm_attend(const edgellm::AttendCall* call) { entries().attend(*call); }

void edgellm_linear(const edgellm::LinearCall* call) { entries().linear(*call); }

void edgellm_mamba2(const edgellm::Mamba2Call* call) { entries().mamba2(*call); }

void edgellm_short_conv(const edgellm::ShortConvCall* call) { entries().short_conv(*call); }

double edgellm_bare_products(int32_t threads, int32_t turns) { return entries().bare_products(threads, turns); }

int32_t edgellm_step(const edgellm::StepCall* call) { return entries().step(*call); }

void edgellm_delta_net(const edgellm::DeltaNetCall* call) { entries().delta_net(*call); }

size_t edgellm_step_workspace(const edgellm::StepCall* call) { return edgellm::scalar_entries.step_workspace(*call); }

void edgellm_experts(const edgellm::ExpertsCall* call) { entries().experts(*call); }

size_t edgellm_experts_workspace(const edgellm::ExpertsCall* call) {
    return edgellm::scalar_entries.experts_workspace(*call);
}

}  // extern "C"
