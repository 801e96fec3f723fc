// The KV cache as the kernels see it; the layout is described in kernels/kv_blocks.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace edgellm {

constexpr int BLOCK = 128;
constexpr int KEYS = 16;  // keys that share a panel
constexpr int PANELS = BLOCK / KEYS;

// In the order of KVFormat in kernels/kv_blocks.py.
enum Format : int32_t { INT8, F16, F32, K8V4, K4V4, K4V2 };

template <int BITS>
using Bits = std::integral_constant<int, BITS>;

// Calls `run` with the bits of keys and of values in sealed blocks of a format; gives whether it seals any.
template <typename Run>
inline bool with_sealed_bits(int32_t format, const Run& run) {
    switch (format) {
        case K8V4: return run(Bits<8>{}, Bits<4>{}), true;
        case K4V4: return run(Bits<4>{}, Bits<4>{}), true;
        case K4V2: return run(Bits<4>{}, Bits<2>{}), true;
        default: return false;
    }
}

// Scales of a row of sealed values, each for as many of its numbers.
constexpr int value_scales(int bits) { return bits == 2 ? 2 : 1; }

// Sealed blocks of a sequence; the layout is described in kernels/sealed_blocks.py.
struct Sealed {
    void *k, *v;
    uint16_t *k_scale, *v_scale;  // half-precision floats
    const int64_t* table;  // block ids of the sequence
};

// Where the rows of a block and KV head begin, counted in rows of a pool.
struct BlockPlace {
    size_t row;
    bool sealed;  // which pool
};

// Blocks of a condensed context, see kernels/head_blocks.py: in place of blocks before number `first` each KV head of
// a layer has full blocks of its own. The same fields, in the same order, as in native.py.
struct HeadBlocks {
    const int64_t* starts;  // [layers * kv_heads + 1], where a head's blocks begin in `places`
    const int64_t* places;  // blocks of one KV head, counted in such blocks of the whole pool
    int32_t first, most;    // first 0: none; most: of any head

    int count(int head) const { return static_cast<int>(starts[head + 1] - starts[head]); }
};

// One sequence's part of the pool; the same fields, in the same order, as in native.py.
struct KV {
    void *k;                   // [blocks, layers, kv_heads, BLOCK / 16, head_dim / 4, 16, 4]
    void *v;                   // [blocks, layers, kv_heads, BLOCK / 4, value_dim, 4]
    float *k_scale, *v_scale;  // [blocks, layers, kv_heads, BLOCK]; null for floats
    const float* key_offset;   // [layers, kv_heads, head_dim], what K is stored less; or null
    const int64_t* table;      // block ids of the sequence
    Sealed sealed;             // of formats that seal blocks
    int32_t layers, kv_heads, head_dim, latent, format;
    int32_t sealed_pool;       // of a step's pools, the one whose table `sealed` has
    int32_t recent;            // last blocks that a row sees beside the first one, its own among them; 0: all
    HeadBlocks heads;

    // Latents stand in place of V, and are a part of each key as well, behind what `k` has of it.
    int value_dim() const { return latent ? latent : head_dim; }
    int key_dim() const { return head_dim + latent; }

    bool seals() const {
        return with_sealed_bits(format, [](auto, auto) {});
    }

    // The sealed keys, or values, of so many bits as a pool of bytes.
    KV sealed_bytes(int bits) const {
        KV bytes = *this;
        bytes.head_dim = head_dim * bits / 8;
        bytes.k = sealed.k;
        bytes.v = sealed.v;
        return bytes;
    }

    // Blocks from 1 to before this one are sealed in a sequence of so many tokens.
    static int sealed_end(int tokens) { return std::max(1, (tokens - 1) / BLOCK - 1); }

    // Where a number lies within its block and KV head.
    size_t key_place(int row, int d) const { return key_place(row, d, head_dim); }
    static size_t key_place(int row, int d, int width) {
        return ((size_t(row / KEYS) * (width / 4) + d / 4) * KEYS + row % KEYS) * 4 + d % 4;
    }
    size_t value_place(int row, int d) const {
        return (size_t(row / 4) * value_dim() + d) * 4 + row % 4;
    }

    // Where the rows of a position's block and KV head begin, counted in rows of the whole pool.
    size_t first_row(int position, int layer, int kv_head) const {
        return first_row_in(table[position / BLOCK], layer, kv_head);
    }
    size_t first_row_in(int64_t block, int layer, int kv_head) const {
        return ((size_t(block) * layers + layer) * kv_heads + kv_head) * BLOCK;
    }

    // What a query at position `from` reads of the block of a position.
    BlockPlace place(int position, int from, int layer, int kv_head) const {
        const int block = position / BLOCK;
        if (block < heads.first)
            return {size_t(heads.places[heads.starts[layer * kv_heads + kv_head] + block]) * BLOCK, false};
        if (!seals() || block == 0 || block >= sealed_end(from + 1))
            return {first_row(position, layer, kv_head), false};
        return {first_row_in(sealed.table[block], layer, kv_head), true};
    }
};

// Cosines and sines of every position, each [positions, half].
struct Rope {
    const float *cos, *sin;
    int64_t half;
};

}  // namespace edgellm
