// The short convolution of a layer.
#pragma once

#include "../cpu/state_rows.h"
#include "../linear/call.h"

namespace edgellm {

// The same fields, in the same order, as in native.py.
struct ShortConv {
    Linear in;             // to B, C and x
    const float* filters;  // [taps, channels], the last tap is that of the row itself
    int32_t taps;

    int channels() const { return in.outputs / 3; }
};

// Arguments of one call of the op without its linear layers; the same fields, in the same order, as in native.py.
struct ShortConvCall {
    ShortConv conv;
    const StateRows* spans;  // span_count
    const float* rows;       // [count, 3 * channels], of one span after the other
    float* out;              // [count, channels]
    int32_t span_count, count, threads;
};

}  // namespace edgellm
