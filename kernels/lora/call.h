// Adapters (LoRA, arXiv:2106.09685): changes of low rank of a model's linear layers.
#pragma once

#include <cstdint>

namespace edgellm {

constexpr int RANKS = 4;  // rows of A that are computed together; ranks are padded to a multiple of it

// The change of one linear layer, y += B (A x), in pairs of bfloat16; the layout is described in weights.py.
struct LowRank {
    const uint32_t *a, *b;
    int32_t rank;  // 0: the layer is not changed
};

// The same fields, in the same order, as in native.py.
struct LayerChanges {
    LowRank q, k, v, o, gate, up, down, q_gate;
};

struct Adapter {
    const LayerChanges* layers;  // of all layers of the model
    int32_t rank;                // the largest one
};

}  // namespace edgellm
