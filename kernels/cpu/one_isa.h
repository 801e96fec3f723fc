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

#define EDGELLM_ENTRIES(isa)                                                                        \
    const edgellm::Entries edgellm::isa##_entries{                                                  \
        isa::append,     isa::seal,          isa::append_latents, isa::attend,    isa::linear,      \
        isa::mamba2,     isa::short_conv,    isa::bare_products,  isa::step,      isa::delta_net,   \
        isa::workspace,  isa::experts,       isa::experts_workspace};
