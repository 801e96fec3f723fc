// The kernels that a step is made of, and the step, for each instruction set.
#pragma once

#include "../delta_net/call.h"
#include "../experts/memory.h"
#include "../step/call.h"
#include "isa.h"

namespace edgellm {

// All kernels that are called with one structure, as DO(set, result, name, structure): a new one is a line here.
#define EDGELLM_EACH_ENTRY(DO, set)                        \
    DO(set, void, append, AppendCall)                      \
    DO(set, void, seal, SealCall)                          \
    DO(set, void, append_latents, AppendLatentsCall)       \
    DO(set, void, attend, AttendCall)                      \
    DO(set, void, linear, LinearCall)                      \
    DO(set, void, mamba2, Mamba2Call)                      \
    DO(set, void, short_conv, ShortConvCall)               \
    DO(set, void, delta_net, DeltaNetCall)                 \
    DO(set, int32_t, step, StepCall)                       \
    DO(set, size_t, step_workspace, StepCall)              \
    DO(set, void, experts, ExpertsCall)                    \
    DO(set, size_t, experts_workspace, ExpertsCall)

struct Entries {
#define EDGELLM_POINTER(set, result, name, structure) result (*name)(const structure&);
    EDGELLM_EACH_ENTRY(EDGELLM_POINTER, none)
#undef EDGELLM_POINTER
    double (*bare_products)(int32_t threads, int32_t turns);
};

extern const Entries avx512_entries, avxvnni_entries, avx2_entries, neon_entries, scalar_entries;

}  // namespace edgellm
