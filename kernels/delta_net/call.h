// What a call of the gated delta net is made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgellm {

constexpr int STATE_COLUMNS = 32;  // of a head's matrix that lie side by side in a state
constexpr int MOST_TAPS = 8;

// The op between the input and output projections of a layer; the same fields, in the same order, as in native.py.
// A state is [taps - 1, channels] columns of the convolution, the oldest first, then the matrix of each value head,
// [value_heads, value_dim / STATE_COLUMNS, key_dim, STATE_COLUMNS].
struct DeltaNet {
    const float* conv;     // [taps, channels]
    const float* decay;    // [value_heads], the rate of forgetting, below 0
    const float* dt_bias;  // [value_heads]
    const float* norm;     // [value_dim]
    float epsilon;
    int32_t key_heads, value_heads, key_dim, value_dim, taps;
    int32_t tiled;  // value head j has key head j % key_heads, else j / (value_heads / key_heads)

    int keys() const { return key_heads * key_dim; }
    int values() const { return value_heads * value_dim; }
    int channels() const { return 2 * keys() + values(); }  // q, k, v
    size_t columns() const { return size_t(taps - 1) * channels(); }
    size_t matrix() const { return size_t(key_dim) * value_dim; }
    size_t state() const { return columns() + value_heads * matrix(); }
    int ratio() const { return value_heads / key_heads; }
    int key_head_of(int head) const { return tiled ? head % key_heads : head / ratio(); }
    // Number i of the value heads of a key head.
    int value_head_of(int key_head, int i) const {
        return tiled ? key_head + i * key_heads : key_head * ratio() + i;
    }
};

// Where the state after the first `rows` rows of a span goes.
struct StateTarget {
    float* state;
    int32_t rows;
};

// Rows of one sequence that follow each other. The last target is for the state after all rows; it may be the source.
struct StateSpan {
    const float* source;  // the state before the first row; null: all zeros
    const StateTarget* targets;
    int32_t target_count, rows;
};

// The projections of all rows: q, k, v and what else a row has, from its beginning on.
struct DeltaInputs {
    const float* rows;
    size_t step;        // numbers from a row to the next
    int32_t z, a, b;    // where these begin in a row

    const float* row(int r) const { return rows + r * step; }
};

// Arguments of one call; the same fields, in the same order, as in native.py.
struct DeltaNetCall {
    DeltaNet net;
    DeltaInputs inputs;
    const StateSpan* spans;  // span_count; their rows come one after the other
    float* out;              // [rows, value_heads * value_dim]
    float* workspace;        // as many floats as DeltaNetBuffers has
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
