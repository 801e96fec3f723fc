#define EDGELLM_SETS EDGELLM_FOR_AVXVNNI
#include "isa.h"
#ifdef EDGELLM_HAS_AVXVNNI
#include "one_isa.h"
EDGELLM_ENTRIES(avxvnni)
#endif
