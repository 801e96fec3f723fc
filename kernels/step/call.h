// What the fused step reads and writes.
#pragma once

#include "../attention/call.h"
#include "../kv_append/call.h"
#include "../linear/call.h"

namespace edgellm {

struct Layer {
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float* qkv_bias;                   // [outputs of q, k and v], or null
    Linear q, k, v, o, gate, up, down;

    int qkv_outputs() const { return q.outputs + k.outputs + v.outputs; }
    bool any_fine() const { return q.fine || k.fine || v.fine; }
};

// A decoder-only transformer; the same fields, in the same order, as in native.py.
struct Transformer {
    const Layer* layers;  // layer_count
    const float* final_norm;  // [hidden]
    Linear embedding, head;   // the same panels where they are tied
    int32_t layer_count, hidden, intermediate, heads, window;
    float epsilon;
};

// Arguments of one step; the same fields, in the same order, as in native.py.
struct StepCall {
    const Transformer* model;
    KV kv;
    Rope rope;
    const int64_t* tokens;  // [count]
    float* states;          // [count, hidden], after the final norm
    float* logits;          // [logit_rows, outputs of the head padded to panels]
    char* workspace;        // edgellm_step_workspace bytes
    int32_t (*should_stop)();  // asked before each layer, in the calling thread; may be null
    int32_t count, start, logit_rows, threads;
};

}  // namespace edgellm
