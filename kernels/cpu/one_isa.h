// Compiles the kernels of a step for the instruction set in EDGELLM_SETS. All kernels are one file, because apart
// from each other they would be compiled twice; each set is a file of its own, so that all cores compile.
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

#include "../step/mixing.h"
#include "../step/places.h"
#include "entries.h"
#include "threads.h"

#define EDGELLM_KERNEL "../step/parts.h"
#include "every_isa.h"

#define EDGELLM_NAME(set, result, name, structure) set::name,
#define EDGELLM_ENTRIES(set) \
    const edgellm::Entries edgellm::set##_entries{EDGELLM_EACH_ENTRY(EDGELLM_NAME, set) set::bare_products};
