// The short convolution of a layer.
#pragma once

#include "../linear/call.h"

namespace edgellm {

constexpr int MOST_TAPS = 16;

// The same fields, in the same order, as in native.py.
struct ShortConv {
    Linear in;             // to B, C and x
    const float* filters;  // [taps, channels], the last tap is that of the row itself
    int32_t taps;

    int channels() const { return in.outputs / 3; }
};

}  // namespace edgellm
