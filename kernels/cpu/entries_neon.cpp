#define EDGELLM_SETS EDGELLM_FOR_NEON
#include "isa.h"
#ifdef EDGELLM_ARM
#include "one_isa.h"
EDGELLM_ENTRIES(neon)
#endif
