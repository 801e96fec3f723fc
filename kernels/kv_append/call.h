// What a call of KV append is made of.
#pragma once

#include "../cpu/kv_blocks.h"

namespace edgellm {

// Arguments of one call; the same fields, in the same order, as in native.py.
struct AppendCall {
    KV kv;
    Rope rope;
    const float* qkv;  // [tokens, heads + 2 kv_heads, head_dim]
    float* q;          // [tokens, heads, head_dim], the rotated queries
    int32_t layer, heads, tokens, start, threads;
};

// A chunk smaller than two tasks is not worth waking a thread for.
constexpr int TOKENS_PER_TASK = 32;

}  // namespace edgellm
