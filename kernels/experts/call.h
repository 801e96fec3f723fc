// The router of a layer with experts.
#pragma once

#include <cstdint>

namespace edgellm {

// The same fields, in the same order, as in native.py.
struct Router {
    const float* weight;  // [experts, hidden]; null where a layer has one MLP
    int32_t experts, used, normalized;
    float scale;
};

}  // namespace edgellm
