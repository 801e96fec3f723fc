// What a call of chunk attention is made of.
#pragma once

#include "../cpu/kv_blocks.h"

namespace edgellm {

// The order of the rows of a KV head, which are the query heads of its group at consecutive tokens: a token's heads one
// after another or, where heads choose what blocks of them read, block by block of positions and in each head by head.
struct RowOrder {
    int start, tokens, group;
    bool by_head;

    struct Row {
        int token, head;
    };
    // Tokens of one block of positions, from `first` to before `end`.
    struct Run {
        int first, end;
    };

    Run block_of(int token) const {
        const int first = (start + token) / BLOCK * BLOCK - start;
        return {std::max(0, first), std::min(tokens, first + BLOCK)};
    }
    int row(int token, int head) const {
        if (!by_head) return token * group + head;
        const Run run = block_of(token);
        return run.first * group + head * (run.end - run.first) + token - run.first;
    }
    Row operator[](int row) const {
        if (!by_head) return {row / group, row % group};
        const Run run = block_of(row / group);
        const int within = row - run.first * group, count = run.end - run.first;
        return {run.first + within % count, within / count};
    }
};

// Queries of consecutive tokens, and where they stand.
struct Queries {
    const float* q;  // [tokens, heads, key_dim], after RoPE
    int32_t heads, tokens, start, window;
    int32_t kv_read;       // tokens that a query reads of sealed blocks and hot ones at most; 0: all
    float mass;            // share of the attention that whole blocks of queries read, see `sparse_blocks`; 0: all
    float scale, softcap;  // of the scores; softcap 0: none
    const float* sinks;    // [heads], a score of each head that has no key and no value, or null

    RowOrder order(int kv_heads) const { return {start, tokens, heads / kv_heads, mass > 0}; }
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
constexpr int SPLIT_BLOCKS = SPLIT / BLOCK;
// Rows that share one walk over the keys.
constexpr int ROWS_PER_TASK = 96;
constexpr int ROWS_BY_HEAD = BLOCK / 2;  // of one head
constexpr int MAX_HEAD_DIM = 512;  // the largest whose scores of int8 numbers fit into 32 bits

inline int split_count(int keys) { return (keys + SPLIT - 1) / SPLIT; }

// Numbers of the blocks that the rows of a walk read, in their order: those that `chosen` names, or all but the `gap`
// ones behind the first `front`. Or so many times PANELS `panels`, in order, of which the last ones are a whole block.
struct BlockList {
    const int32_t* chosen;
    int count, gap, front;
    const int32_t* panels;

    // With panels of several blocks, the first one's.
    int operator[](int i) const {
        if (panels) return panels[i * PANELS] / PANELS;
        return chosen ? chosen[i] : i < front ? i : i + gap;
    }
    bool whole(int i) const {
        if (!panels) return true;
        const int32_t* of = panels + i * PANELS;
        return of[0] % PANELS == 0 && of[PANELS - 1] == of[0] + PANELS - 1;
    }
    int splits() const { return (count + SPLIT_BLOCKS - 1) / SPLIT_BLOCKS; }
};

// The blocks of K and V that a row at a position sees. The first numbers stand for a head's own blocks, if it has some.
inline BlockList blocks_seen(const KV& kv, int position, int layer, int kv_head) {
    const int own = position / BLOCK;
    if (kv.heads.first) {
        const int count = kv.heads.count(layer * kv.kv_heads + kv_head), gap = kv.heads.first - count;
        return {nullptr, own + 1 - gap, gap, count, nullptr};
    }
    const int gap = kv.recent ? std::max(0, own - kv.recent) : 0;
    return {nullptr, own + 1 - gap, gap, 1, nullptr};
}

// Blocks of query positions `from` to before `to`.
struct BlockRange {
    int from, to;

    bool has(int block) const { return from <= block && block < to; }
};

// Position from which on a block of queries chooses what it reads. At 4,096 attention is a third of the time of a prompt.
constexpr int DENSE_POSITIONS = 4096;

// Blocks that choose what they read by a share of the attention: whole ones among consecutive rows.
inline BlockRange sparse_blocks(int start, int rows, float mass) {
    const int from = std::max(start + BLOCK - 1, DENSE_POSITIONS) / BLOCK;
    return {from, mass > 0 ? std::max(from, (start + rows) / BLOCK) : from};
}

// The lists of panels that these read for each head, each behind its length, `stride` numbers apart.
struct PanelLists {
    int32_t* lists;
    size_t stride;
    int heads;
    BlockRange of;

    int count() const { return (of.to - of.from) * heads; }
    int32_t* list(int block, int head) const { return lists + (size_t(block - of.from) * heads + head) * stride; }
    BlockList read(int block, int head) const {
        if (!of.has(block)) return {};
        const int32_t* panels = list(block, head);
        return {nullptr, panels[0] / PANELS, 0, 0, panels + 1};
    }
    static size_t stride_for(BlockRange blocks) { return blocks.to * PANELS + 1; }
};

// How many blocks a row at a position reads of those that it sees.
inline int blocks_read(int position, int kv_read) { return std::min(position / BLOCK + 1, kv_read / BLOCK); }

// The sealed blocks that a row at a position sees, block 1 and those behind it.
inline BlockList sealed_blocks(int position) { return {nullptr, position / BLOCK - 2, 1, 0, nullptr}; }

}  // namespace edgellm
