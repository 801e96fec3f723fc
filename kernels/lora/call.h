// Adapters (LoRA, arXiv:2106.09685): changes of low rank of a model's linear layers.
#pragma once

#include <cstdint>

namespace edgellm {

constexpr int RANKS = 4;  // rows of A that are computed together; ranks are padded to a multiple of it

// The change of one linear layer, y += B (scale * A x), in int8; the layout is described in weights.py.
struct LowRank {
    const int8_t *a, *b;
    const float* scale;  // of each rank
    int32_t rank;        // 0: the layer is not changed
    int32_t a_step, b_step, scale_step;  // from what one head has to that of the next; 0: all heads have the same
};

// The same fields, in the same order, as in native.py.
struct LayerChanges {
    LowRank q, k, v, o, gate, up, down, q_gate;
    LowRank query_down, key_up, value_up;  // of attention over latents
    LowRank conv_in, mamba_in, mamba_o, delta_qkv, delta_z, delta_a, delta_b;
    LowRank shared_gate, shared_up, shared_down;  // of the expert that all rows go through
};

struct Adapter {
    const LayerChanges* layers;  // of all layers of the model
    int32_t rank;                // the largest one
};

}  // namespace edgellm
