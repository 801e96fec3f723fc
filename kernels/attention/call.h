// What a call of chunk attention is made of.
#pragma once

#include "../cpu/kv_blocks.h"

namespace edgellm {

// Queries of consecutive tokens, and where they stand.
struct Queries {
    const float* q;  // [tokens, heads, key_dim], after RoPE
    int32_t heads, tokens, start, window;
    float scale, softcap;  // of the scores; softcap 0: none
    const float* sinks;    // [heads], a score of each head that has no key and no value, or null
};

// Arguments of one call; the same fields, in the same order, as in native.py.
struct AttendCall {
    KV kv;
    Queries queries;
    float* out;  // [tokens, heads, value_dim]
    int32_t layer, threads;
};

// Keys are taken in splits of this many, each with a softmax of its own, which are then joined in
// order: a row has the same bits whoever computes its splits and however many rows there are.
constexpr int SPLIT = 512;
// Rows that share one walk over the keys.
constexpr int ROWS_PER_TASK = 96;
constexpr int MAX_HEAD_DIM = 512;  // the largest whose scores of int8 numbers fit into 32 bits

inline int split_count(int keys) { return (keys + SPLIT - 1) / SPLIT; }

}  // namespace edgellm
