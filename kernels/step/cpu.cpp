// The fused step: embedding to logits for 1 token or some, in one call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <type_traits>

#include "../cpu/threads.h"
#include "call.h"

// The parts that a step is made of, then the step.
#define EDGELLM_KERNEL "../step/parts.h"
#include "../cpu/every_isa.h"

extern "C" int32_t edgellm_step(const edgellm::StepCall* call) { EDGELLM_CALL(step(*call)) }

extern "C" size_t edgellm_step_workspace(const edgellm::StepCall* call) {
    return scalar::workspace(*call);
}
