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
    int32_t experts, used, normalized, sigmoid;
    float scale;
};

// The same fields, in the same order, as in native.py.
struct SharedExpert {
    Linear gate, up, down;  // without panels where there is none
    const float* router;    // [hidden]: its output counts by the sigmoid of the product; null: whole
};

}  // namespace edgellm
