#define EDGELLM_SETS EDGELLM_FOR_AVX512
#include "isa.h"
#ifdef EDGELLM_X86
#include "one_isa.h"
EDGELLM_ENTRIES(avx512)
#endif
