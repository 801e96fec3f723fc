// What attention over latents has in place of V, and between a row and its queries.
#pragma once

#include "../cpu/kv_blocks.h"
#include "../linear/call.h"

namespace edgellm {

// The same fields, in the same order, as in native.py; see weights.py.
struct Latent {
    Linear query_down;         // [query rank, hidden]; without panels where queries are made of the row itself
    Linear key_up, value_up;   // of all heads, one behind the other: [heads * rank, key], [heads * value, rank]
    const float *query_norm, *norm;  // [query rank], [rank]
    float epsilon;

    bool there() const { return key_up.panels != nullptr; }
    int key() const { return key_up.inputs; }    // numbers of a head's query that RoPE does not reach
    int rank() const { return value_up.inputs; }
};

// Arguments of one call that writes keys and latents; the same fields, in the same order, as in native.py.
struct AppendLatentsCall {
    KV kv;
    Rope rope;
    const float* norm;  // [latent]
    const float* rows;  // [tokens, heads * key_dim + key_dim]: queries behind key_up, then the key and the latent
    float* q;           // [tokens, heads, key_dim], the rotated queries
    float epsilon;
    int32_t layer, heads, tokens, start, threads;
};

}  // namespace edgellm
