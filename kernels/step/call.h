// What the fused step reads and writes.
#pragma once

#include "../attention/call.h"
#include "../experts/call.h"
#include "../kv_append/call.h"
#include "../linear/call.h"

namespace edgellm {

enum Activation : int32_t { SILU, GELU_TANH };

// Of a row of the residual: an RMS norm, or with a bias a layer norm; without a weight none.
struct Norm {
    const float *weight, *bias;  // [hidden]
};

// The same fields, in the same order, as in native.py; vectors that are not there are null.
struct Layer {
    // gate without panels where there is none; with a router the three of all experts, one behind the other
    Linear q, k, v, o, gate, up, down;
    Norm attention_norm;
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    Norm post_attention_norm, mlp_norm;
    const float *gate_bias, *up_bias, *down_bias;
    Norm post_mlp_norm;
    HeadNorms head_norms;
    Router router;
    float scale, softcap;  // of the scores; softcap 0: none
    int32_t heads, window, rope, activation;
    int32_t pool, slot;  // which of the call's pools has its K and V, and as which layer

    int qkv_outputs() const { return q.outputs + k.outputs + v.outputs; }
    bool gated() const { return gate.panels != nullptr; }
    bool has_experts() const { return router.weight != nullptr; }
    bool any_fine() const { return q.fine || k.fine || v.fine; }
};

// A decoder-only transformer; the same fields, in the same order, as in native.py.
struct Transformer {
    const Layer* layers;  // layer_count
    Norm final_norm;
    Linear embedding, head;  // the same panels where they are tied
    int32_t layer_count, hidden;
    float epsilon, embedding_scale, logit_softcap;  // the last one 0: none
};

// Rows of a step that are consecutive tokens of one sequence; the same fields as in native.py.
struct Span {
    const int64_t* const* tables;  // the sequence's block ids in each pool
    int32_t rows, start;           // they stand at positions start ..
    int32_t logit_rows;            // the last so many of them go through the head
};

// Arguments of one step; the same fields, in the same order, as in native.py.
struct StepCall {
    const Transformer* model;
    const KV* pools;        // those that layers name by their index, without a table
    const Rope* ropes;      // those that layers name by their index
    const Span* spans;      // span_count; their rows come one after the other
    const int64_t* tokens;  // [count]
    const float* entering;  // [count, hidden], the residual before first_layer; not read where it is 0
    float* states;          // [count, hidden], after the final norm, or the residual where layers are left
    float* logits;          // [logit_rows, outputs of the head padded to panels]
    char* workspace;        // edgellm_step_workspace bytes
    int32_t (*should_stop)();  // asked before each layer, in the calling thread; may be null
    int32_t span_count, count, logit_rows, threads;  // rows of all spans together
    int32_t first_layer, last_layer;  // from the one to before the other; embedding and head are the ends'
};

// Arguments of the experts of one layer; the same fields, in the same order, as in native.py.
struct ExpertsCall {
    const Transformer* model;
    const float* x;   // [count, hidden], normalized
    float* y;         // [count, hidden]
    char* workspace;  // edgellm_experts_workspace bytes
    int32_t layer, count, threads;
};

}  // namespace edgellm
