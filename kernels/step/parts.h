// A step and the kernels that it is made of.
#include "../linear/unpack.h"
#include "../linear/cpu.h"
#include "../linear/peak.h"
#include "../kv_append/cpu.h"
#include "../attention/cpu.h"
#include "mlp.h"
#include "../experts/cpu.h"
#include "cpu.h"
