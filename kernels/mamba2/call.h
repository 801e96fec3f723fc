// What a Mamba-2 layer is made of beside its linear layers, and a call of the op alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgellm {

// Channels of a head whose states lie side by side: LANE_BLOCK in vectors.py.
constexpr int LANE_BLOCK = 16;

// The same fields, in the same order, as in native.py; vectors.py says what they are.
struct Mamba2 {
    const float *conv, *conv_bias;        // [taps, channels], [channels] or null
    const float *dt_bias, *decay, *skip;  // [heads]
    const float* norm;                    // [inner]
    int32_t heads, head_dim, state_dim, groups, taps;
    float epsilon;

    int inner() const { return heads * head_dim; }
    int channels() const { return inner() + 2 * groups * state_dim; }
    // Numbers of all heads, in whole vectors.
    int padded_heads() const { return (heads + LANE_BLOCK - 1) / LANE_BLOCK * LANE_BLOCK; }
    // A row that comes in: z; x, B and C; dt.
    int inputs() const { return inner() + channels() + padded_heads(); }
    // A row behind the convolution: x, B and C; the step and the decay of each head.
    int mixed() const { return channels() + 2 * padded_heads(); }
    // A state: the last rows of x, B and C, then [heads, head_dim / LANE_BLOCK, state_dim, LANE_BLOCK].
    size_t conv_size() const { return size_t(taps - 1) * channels(); }
    int head_blocks() const { return inner() / LANE_BLOCK; }
};

// Where the state after the first `rows` rows of a span goes.
struct StateTarget {
    float* state;
    int32_t rows;
};

// Rows of one sequence, and its states. The last target is for all rows; the first one may be the source.
struct StateSpan {
    const float* source;  // the state before the first row; null: zeros
    const StateTarget* targets;
    int32_t target_count, rows;
};

// Arguments of one call; the same fields, in the same order, as in native.py.
struct Mamba2Call {
    Mamba2 layer;
    const StateSpan* spans;  // span_count; their rows come one after the other
    const float* rows;       // [count, inputs]
    float* mixed;            // [count, mixed], written over
    float* out;              // [count, inner]
    int32_t span_count, count, threads;
};

}  // namespace edgellm
