// The kernels that a step is made of, and the step, for each instruction set.
#pragma once

#include "../delta_net/call.h"
#include "../experts/memory.h"
#include "../step/call.h"
#include "isa.h"

namespace edgellm {

struct Entries {
    void (*append)(const AppendCall&);
    void (*seal)(const SealCall&);
    void (*append_latents)(const AppendLatentsCall&);
    void (*attend)(const AttendCall&);
    void (*linear)(const LinearCall&);
    void (*mamba2)(const Mamba2Call&);
    void (*short_conv)(const ShortConvCall&);
    double (*bare_products)(int32_t threads, int32_t turns);
    int32_t (*step)(const StepCall&);
    void (*delta_net)(const DeltaNetCall&);
    size_t (*step_workspace)(const StepCall&);
    void (*experts)(const ExpertsCall&);
    size_t (*experts_workspace)(const ExpertsCall&);
};

extern const Entries avx512_entries, avxvnni_entries, avx2_entries, neon_entries, scalar_entries;

}  // namespace edgellm
