// What the fused step reads and writes.
#pragma once

#include <limits>

#include "../altup/call.h"
#include "../attention/call.h"
#include "../cpu/state_rows.h"
#include "../delta_net/call.h"
#include "../experts/call.h"
#include "../kv_append/call.h"
#include "../kv_seal/call.h"
#include "../latent/call.h"
#include "../linear/call.h"
#include "../lora/call.h"
#include "../mamba2/call.h"
#include "../short_conv/call.h"

namespace edgellm {

enum Activation : int32_t { SILU, GELU_TANH, CLAMPED_SWIGLU };
enum Mixer : int32_t { ATTENTION, SHORT_CONV, MAMBA2, DELTA_NET };

// Of a row of the residual: an RMS norm, or with a bias a layer norm; without a weight none.
struct Norm {
    const float *weight, *bias;  // [hidden]
};

// What a token's own embedding for a layer adds behind the MLP: output(activation(gate(x)) * e), where e is made of
// the embedding and of context(first row of the token), see `activate_input`. Without panels there is none.
struct LayerInput {
    Linear context, gate, output;  // [width, hidden] twice, [hidden, width]
    const float* post_norm;        // [hidden], of what is added
};

// What a layer adds beside attention: norm(right(left(x))) of the same normalized rows x, these rows themselves, and all
// of it times sqrt(1 / 2). Without panels there is none.
struct Laurel {
    Linear left, right;      // [rank, hidden], [hidden, rank]
    const float* post_norm;  // [hidden]
};

// The same fields, in the same order, as in native.py; vectors that are not there are null.
struct Layer {
    // q, k and v are those of attention: k and v without panels in a layer that reads those of another, v where it is k
    // before its norm; with latents k is what RoPE turns, and v makes the latent. gate without panels where there is none; with a router the three of all experts, one behind the
    // other, as are their biases
    Linear q, k, v, o, gate, up, down;
    Linear output_gate;  // of attention; without panels where there is none
    Linear beside_o;     // output projection of a mamba2 beside attention; without panels where there is none
    Norm attention_norm;
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    Norm post_attention_norm, mlp_norm;
    const float *gate_bias, *up_bias, *down_bias;
    Norm post_mlp_norm;
    HeadNorms head_norms;
    Latent latent;
    Router router;
    SharedExpert shared;
    const float* sinks;    // [heads]
    LayerInput input;
    Laurel laurel;
    AltUp altup;
    ShortConv short_conv;
    Mamba2 mamba2;
    DeltaNet delta_net;
    float scale, softcap;  // of the scores; softcap 0: none
    float output_scale;    // of the residual, at the end of the layer
    // standard deviations above a row's mean from which on a gate counts, by what it exceeds; -infinity: all count
    float cutoff;
    int32_t heads, window, rope, activation;
    int32_t pool, slot;  // which of the call's pools has its K and V, or its state, and as which layer
    int32_t beside_pool, beside_slot;  // the same for the state of what is beside attention
    int32_t mixer, state_size;  // state_size: floats of its state; 0 where it has none

    bool attends() const { return mixer == ATTENTION; }
    bool has_beside() const { return beside_o.panels != nullptr; }
    // The output projection of the mixer that keeps a state.
    const Linear& state_out() const { return has_beside() ? beside_o : o; }
    bool has_own_kv() const { return k.panels != nullptr; }
    bool has_input() const { return input.gate.panels != nullptr; }
    bool has_laurel() const { return laurel.left.panels != nullptr; }
    bool cuts_off() const { return cutoff > std::numeric_limits<float>::lowest(); }
    int qkv_outputs() const { return q.outputs + 2 * k.outputs; }  // V may be K
    int laurel_at() const { return qkv_outputs() + output_gate.outputs; }  // behind what attention has
    // What the mixer's input projections give for a row.
    int mixed_outputs() const {
        if (mixer == SHORT_CONV) return short_conv.in.outputs;
        if (mixer == MAMBA2) return mamba2.inputs();
        if (latent.there()) return q.outputs + k.outputs + v.outputs + latent.query_down.outputs;
        return mixer == DELTA_NET ? delta_net.outputs() : laurel_at() + laurel.left.outputs;
    }
    bool gated() const { return gate.panels != nullptr; }
    bool has_experts() const { return router.weight != nullptr; }
    bool any_fine() const { return q.fine || k.fine || v.fine || delta_net.a.fine; }
};

// A decoder-only transformer; the same fields, in the same order, as in native.py.
struct Transformer {
    const Layer* layers;  // layer_count
    Norm final_norm;
    Linear embedding, head;  // the same panels where they are tied
    Linear layer_table;      // [vocabulary * layers, width], embeddings of a token for each layer; or without panels
    const float* layer_norm;  // [width], of their contexts
    Linear streams_enter, streams_leave;  // of each residual stream but the first, one behind the other
    ExpertMemory* expert_memory;  // null: all experts stay in memory
    int32_t layer_count, hidden, streams;  // residual streams, 1 or more
    float epsilon, embedding_scale, logit_softcap;  // the last one 0: none

    // Numbers of a row between two layers.
    int width() const { return streams * hidden; }
};

// Layers before the first one whose rows may read a part of what they see.
constexpr int DENSE_LAYERS = 2;

// Rows at so many positions, from a multiple of it on, choose among the blocks on the shortlist of the first of them
// that is computed: its best ones, behind its position plus 1. Looking at all sealed blocks is 13 of 30 ms a token
// behind 32,000 tokens (SmolLM2-135M, AVX2). There are enough shortlists for all rows that may be taken back.
constexpr int SHORTLIST_ROWS = 16, SHORTLISTS = 64;
static_assert(BLOCK % SHORTLIST_ROWS == 0, "the rows see the same sealed blocks");

// The states of a span in a pool; the same fields as in native.py.
struct StateSpan {
    const float* source;         // the block with the states before the first row; null: all zeros
    const StateTarget* targets;  // in the order of their rows, the last one for all rows
};

// Rows of a step that are consecutive tokens of one sequence; the same fields as in native.py.
struct Span {
    const int64_t* const* tables;  // the sequence's block ids in each pool
    const Adapter* adapter;        // may be null
    const StateSpan* states;       // in each pool; null where no layer has a state
    const HeadBlocks* heads;       // in each pool; null where the context is whole
    float* const* shares;          // in each pool, to be raised to what rows give to keys; null: are not asked for
    int32_t* const* shortlists;    // in each pool, [layer_count, kv_heads, SHORTLISTS, 1 + listed]; null: none
    int32_t rows, start;           // they stand at positions start ..
    int32_t logit_rows;            // the last so many of them go through the head
    int32_t adapter_start;         // the first so many of them go without the adapter
    int32_t kv_read;               // tokens that each row reads at most, in layers behind the first ones; 0: all
    float mass;                    // share of the attention that whole blocks of rows read; 0: all
    int32_t share_blocks;          // blocks of keys whose shares are asked for
    int32_t listed;                // blocks on a shortlist

    BlockRange sparse_blocks() const { return edgellm::sparse_blocks(start, rows, mass); }
    bool chooses_panels() const { return sparse_blocks().from < sparse_blocks().to; }
    bool chooses() const { return kv_read > 0 && start + rows > kv_read / BLOCK * BLOCK; }
};

// Arguments of one step; the same fields, in the same order, as in native.py.
struct StepCall {
    const Transformer* model;
    const KV* pools;        // those that layers name by their index, without a table; empty ones of states
    const Rope* ropes;      // those that layers name by their index
    const Span* spans;      // span_count; their rows come one after the other
    const int64_t* tokens;  // [count]
    const float* entering;  // [count, width], all streams before first_layer; null: the embeddings of the tokens
    float* states;          // [count, hidden] after the final norm, or [count, width] where layers are left
    float* logits;          // [logit_rows, outputs of the head padded to panels]
    char* workspace;        // edgellm_step_workspace bytes
    int32_t (*should_stop)();  // asked before each layer, in the calling thread; may be null
    int32_t span_count, count, logit_rows, threads;  // rows of all spans together
    int32_t first_layer, last_layer;  // from the one to before the other; embedding and head are the ends'
};

// Arguments of the experts of one layer; the same fields, in the same order, as in native.py.
struct ExpertsCall {
    const Transformer* model;
    const float* x;   // [count, hidden], normalized; of a layer with an MLP beside its experts, of the residual
    float* y;         // [count, hidden]
    char* workspace;  // edgellm_experts_workspace bytes
    int32_t layer, count, threads;
};

}  // namespace edgellm
