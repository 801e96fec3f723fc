// One quantized linear layer, on its own: what the fused step is made of, for tests and timings.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../cpu/threads.h"
#include "call.h"

#define EDGELLM_KERNEL "../linear/cpu.h"
#include "../cpu/every_isa.h"

extern "C" void edgellm_linear(const edgellm::LinearCall* call) { EDGELLM_CALL(linear(*call)) }
