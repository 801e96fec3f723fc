// The Mamba-2 of a layer, and a call of the op alone.
#pragma once

#include "../cpu/state_rows.h"
#include "../linear/call.h"

namespace edgellm {

// Channels of a head whose states lie side by side: LANE_BLOCK in weights.py.
constexpr int LANE_BLOCK = 16;

// The same fields, in the same order, as in native.py; weights.py says what they are.
struct Mamba2 {
    Linear in;                            // to z, x, B, C and dt
    const float *conv, *conv_bias;        // [taps, channels], [channels] or null
    const float *dt_bias, *decay, *skip;  // [heads]
    const float* norm;                    // [inner] or null
    int32_t heads, head_dim, state_dim, groups, taps;
    float epsilon;

    int inner() const { return heads * head_dim; }
    int channels() const { return inner() + 2 * groups * state_dim; }
    // A number of each head, in whole panels.
    int padded_heads() const { return (heads + LANE_BLOCK - 1) / LANE_BLOCK * LANE_BLOCK; }
    // A row behind `in`: z; x, B and C; dt.
    int inputs() const { return inner() + channels() + padded_heads(); }
    // A row behind the convolution: x, B and C; the step and the decay of each head.
    int mixed() const { return channels() + 2 * padded_heads(); }
    // A state: the last rows of x, B and C, then [heads, head_dim / LANE_BLOCK, state_dim, LANE_BLOCK].
    size_t conv_size() const { return size_t(taps - 1) * channels(); }
    int head_blocks() const { return inner() / LANE_BLOCK; }
};

// Arguments of one call of the op without its linear layers; the same fields, in the same order, as in native.py.
struct Mamba2Call {
    Mamba2 layer;
    const StateRows* spans;  // span_count
    const float* rows;       // [count, inputs], of one span after the other
    float* mixed;            // [count, mixed], written over
    float* out;              // [count, inner]
    int32_t span_count, count, threads;
};

}  // namespace edgellm
