// What a call of KV append is made of.
#pragma once

#include "../cpu/kv_blocks.h"

namespace edgellm {

// RMS norms of Q, K and V; see norms.py.
struct HeadNorms {
    const float *q, *k;  // [head_dim] of each head, or of all heads one after the other; or null
    float epsilon;
    int32_t whole;       // all heads together
    int32_t after_rope;
    int32_t values;      // each head of V too, without a weight
};

// Arguments of one call; the same fields, in the same order, as in native.py.
struct AppendCall {
    KV kv;
    Rope rope;
    HeadNorms norms;
    const float* qkv;  // [tokens, heads + 2 kv_heads, head_dim]; of a layer that reads K and V of another, queries alone
    float* q;          // [tokens, heads, head_dim], the rotated queries
    int32_t layer, heads, tokens, start, threads;
    int32_t queries_alone;
};

// A chunk smaller than two tasks is not worth waking a thread for.
constexpr int TOKENS_PER_TASK = 32;

}  // namespace edgellm
