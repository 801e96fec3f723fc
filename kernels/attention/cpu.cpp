// Native chunk attention: one entry point, one version for each instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../cpu/threads.h"
#include "call.h"

#define EDGELLM_KERNEL "../attention/cpu.h"
#include "../cpu/every_isa.h"

extern "C" void edgellm_attend(const edgellm::AttendCall* call) { EDGELLM_CALL(attend(*call)) }
