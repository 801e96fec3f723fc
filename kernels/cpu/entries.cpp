// The entry points of the kernels that a step is made of, and of the step. They are one file because
// apart from each other they would all be compiled twice, for every instruction set.
#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../delta_net/call.h"
#include "../experts/memory.h"
#include "../step/call.h"
#include "../step/mixing.h"
#include "../step/places.h"
#include "threads.h"

#define EDGELLM_KERNEL "../step/parts.h"
#include "every_isa.h"

extern "C" {

void edgellm_append(const edgellm::AppendCall* call) { EDGELLM_CALL(append(*call)) }

void edgellm_attend(const edgellm::AttendCall* call) { EDGELLM_CALL(attend(*call)) }

void edgellm_linear(const edgellm::LinearCall* call) { EDGELLM_CALL(linear(*call)) }

void edgellm_mamba2(const edgellm::Mamba2Call* call) { EDGELLM_CALL(mamba2(*call)) }

void edgellm_short_conv(const edgellm::ShortConvCall* call) { EDGELLM_CALL(short_conv(*call)) }

double edgellm_bare_products(int32_t threads, int32_t turns) { EDGELLM_CALL(bare_products(threads, turns)) }

int32_t edgellm_step(const edgellm::StepCall* call) { EDGELLM_CALL(step(*call)) }

void edgellm_delta_net(const edgellm::DeltaNetCall* call) { EDGELLM_CALL(delta_net(*call)) }

size_t edgellm_step_workspace(const edgellm::StepCall* call) { return scalar::workspace(*call); }

void edgellm_experts(const edgellm::ExpertsCall* call) { EDGELLM_CALL(experts(*call)) }

size_t edgellm_experts_workspace(const edgellm::ExpertsCall* call) { return scalar::experts_workspace(*call); }

}  // extern "C"
