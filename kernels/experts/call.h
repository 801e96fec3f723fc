// The router of a layer with experts, and the expert that all rows go through.
#pragma once

#include <cstdint>

#include "../linear/call.h"

namespace edgellm {

// The same fields, in the same order, as in native.py.
struct Router {
    const float* weight;     // [experts, hidden]; null where a layer has one MLP
    const float* bias;       // [experts], of the logits, or null
    const float* selection;  // [experts], added to the scores for the choice alone, or null
    const float* scales;     // [experts], factors of the shares, or null
    int32_t experts, used, normalized, sigmoid, groups, used_groups;
    float scale;
};

// The same fields, in the same order, as in native.py.
struct SharedExpert {
    Linear gate, up, down;  // without panels where there is none
    const float* router;    // [hidden]: its output counts by the sigmoid of the product; null: whole
    // [hidden] each, or null: norms of its output and of the sum of the other experts', and norms of the residual that
    // these and the router read in place of the row that the shared expert reads
    const float *post_norm, *experts_post_norm, *experts_norm, *router_norm;
};

// The experts of a model that are in memory, those used last, up to a limit. The same fields, in the same order, as in
// __init__.py.
struct ExpertMemory {
    int64_t limit, resident;  // bytes
    int64_t clock, hits, reads, bytes_read;  // layers that were computed; what they found, and what they read
    int64_t* used;            // [layers, stride]: when an expert was used last; 0 of one that is not in memory
    int32_t* holders;         // [layers, stride]: steps that compute with each expert now
    int32_t stride;
};

// The matrix of one of the experts.
inline Linear expert_of(Linear all, int experts, int expert) {
    all.outputs /= experts;
    all.panels += size_t(expert) * all.count() * all.panel_bytes();
    return all;
}

}  // namespace edgellm
