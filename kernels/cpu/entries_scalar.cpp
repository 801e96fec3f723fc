#define EDGELLM_SETS EDGELLM_FOR_SCALAR
#include "one_isa.h"
EDGELLM_ENTRIES(scalar)
