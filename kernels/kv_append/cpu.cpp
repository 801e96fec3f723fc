// Native RoPE, quantization and append of one chunk: one pass over its rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../cpu/threads.h"
#include "call.h"

#define EDGELLM_KERNEL "../kv_append/cpu.h"
#include "../cpu/every_isa.h"

extern "C" void edgellm_append(const edgellm::AppendCall* call) { EDGELLM_CALL(append(*call)) }
