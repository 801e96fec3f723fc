// What a call of the gated delta net is made of.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../cpu/state_rows.h"
#include "../linear/call.h"

namespace edgellm {

constexpr int STATE_COLUMNS = 32;  // of a head's matrix that lie side by side in a state
constexpr int MOST_DELTA_TAPS = 8;

// The gated delta net of a layer; the same fields, in the same order, as in native.py. A state is
// [taps - 1, channels] inputs of the convolution, the oldest first, then the matrix of each value head,
// [value_heads, value_dim / STATE_COLUMNS, key_dim, STATE_COLUMNS].
struct DeltaNet {
    Linear qkv, z, a, b;
    const float* conv;     // [taps, channels], the last tap is that of the row itself
    const float* decay;    // [value_heads], the rate of forgetting, below 0
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_dim]
    int32_t key_heads, value_heads, key_dim, value_dim, taps;
    int32_t tiled;  // value head j has key head j % key_heads, else j / (value_heads / key_heads)

    int keys() const { return key_heads * key_dim; }
    int values() const { return value_heads * value_dim; }
    int channels() const { return 2 * keys() + values(); }  // q, k, v
    size_t columns() const { return size_t(taps - 1) * channels(); }
    size_t matrix() const { return size_t(key_dim) * value_dim; }
    int ratio() const { return value_heads / key_heads; }
    int key_head_of(int head) const { return tiled ? head % key_heads : head / ratio(); }
    // Number i of the value heads of a key head.
    int value_head_of(int key_head, int i) const {
        return tiled ? key_head + i * key_heads : key_head * ratio() + i;
    }

    // Where the projections of a row begin behind q, k and v. They are whole panels.
    int z_at() const { return channels(); }
    int a_at() const { return z_at() + values(); }
    int b_at() const { return a_at() + a.count() * PANEL; }
    int outputs() const { return b_at() + b.count() * PANEL; }
};

// Arguments of one call; the same fields, in the same order, as in native.py.
struct DeltaNetCall {
    DeltaNet net;
    const float* in;         // [rows, net.outputs()]
    const StateRows* spans;  // span_count; their rows come one after the other
    float* out;              // [rows, value_heads * value_dim]
    float* workspace;        // as many floats as DeltaNetBuffers has
    float epsilon;           // of the norms
    int32_t span_count, rows, threads;
};

// Rows of all heads between the phases of a call. What belongs to a head lies in one run, which its tasks read from
// one end to the other.
struct DeltaNetBuffers {
    float* keys;     // [key_heads, rows, 2, key_dim]: k and q
    float* values;   // [value_heads, rows, value_dim]: v, then the outputs
    float* numbers;  // [value_heads, rows, 3]: e^g, beta, k * q

    static size_t floats(const DeltaNet& net, int rows) {
        return size_t(rows) * (2 * net.keys() + net.values() + 3 * net.value_heads);
    }
    static DeltaNetBuffers in(float* memory, const DeltaNet& net, int rows) {
        float* values = memory + size_t(rows) * 2 * net.keys();
        return {memory, values, values + size_t(rows) * net.values()};
    }
};

}  // namespace edgellm
