// Quantized linear layers in panels; the layout is described in panels.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace edgellm {

constexpr int GROUP = 32;   // inputs that share a scale
constexpr int PANEL = 16;   // outputs that lie side by side
constexpr int ROW_BLOCK = 48;  // rows whose numbers lie side by side; 6, 8 and 16 are computed together
constexpr int STARTS = 5;      // that sums of products may have, see set_starts

// In the order of KINDS in ../quantized.py, which says what they stand for.
enum Kind : int32_t {
    INT4_SYMMETRIC, INT4_AFFINE, INT8_SYMMETRIC, INT8_AFFINE, INT5_SYMMETRIC, INT5_AFFINE,
    INT4_K, INT5_K, INT6_K, IQ4_NL, IQ4_XS, MXFP4, KINDS
};

struct Traits {
    int bits;
    bool affine, blocked;
    int parts;  // of a group, which have scales of their own
    bool table;
};
constexpr Traits TRAITS[KINDS] = {
    {4, false, false, 1, false}, {4, true, false, 1, false}, {8, false, false, 1, false},
    {8, true, false, 1, false},  {5, false, false, 1, false}, {5, true, false, 1, false},
    {4, true, true, 1, false},   {5, true, true, 1, false},   {6, false, true, 2, false},
    {4, false, false, 1, true},  {4, false, true, 1, true},   {4, false, false, 1, true},
};
constexpr int BLOCK_GROUPS = 8;  // that share halves in blocked kinds

// Bytes of one group of a panel, and of what the groups of a block share.
constexpr size_t group_bytes(int kind) {
    const Traits f = TRAITS[kind];
    return 64 * f.bits + (f.blocked ? PANEL : 2 * PANEL) * (f.parts + f.affine);
}
constexpr size_t block_bytes(int kind) {
    return TRAITS[kind].blocked ? 2 * PANEL * (1 + TRAITS[kind].affine) : 0;
}

// A weight [outputs, inputs]; outputs padded to whole panels with zeros.
struct Linear {
    const uint8_t* panels;
    int32_t outputs, inputs, kind;
    int32_t fine;  // whether its inputs have 16 bits instead of 8

    int count() const { return (outputs + PANEL - 1) / PANEL; }
    size_t panel_bytes() const {
        const int groups = inputs / GROUP;
        return groups * group_bytes(kind) + groups / BLOCK_GROUPS * block_bytes(kind);
    }
    const uint8_t* panel(int index) const { return panels + index * panel_bytes(); }
};

// What belongs to a group of a row's codes, or of its fine codes; two rows share a line of the cache, as their codes
// do.
struct RowGroup {
    float scale;            // of both, with the codes
    float shift;            // scale * (sum of the codes), and with the fine codes
    int32_t start[STARTS];  // what sums of products start from
    int32_t unused;
};

// Quantized activations: value = scale * code, or with the fine code as well, see quantize_rest in
// ../cpu/quantize.h. Rows lie in blocks of ROW_BLOCK, the last one of those that are left: what a group has of
// all rows of a block lies side by side, so that kernels reach them from one address, and rows whose width is a
// power of two do not meet in the same lines of the cache. Threads with two rows each or more write no line of each
// other: with each number of all rows side by side, a prompt of 32 took 10 % longer (SmolLM2-135M, two threads, Zen 4).
struct Rows {
    int8_t *codes, *fine;            // [blocks, width / GROUP, rows of the block, GROUP]
    RowGroup *groups, *fine_groups;  // [blocks, width / GROUP, rows of the block]
    int32_t rows, width;

    static size_t bytes(int rows, int width) {
        const size_t values = size_t(rows) * width;
        return (2 * (values + values / GROUP * sizeof(RowGroup)) + 255) / 64 * 64;
    }
    static Rows in(char* memory, int rows, int width) {
        const size_t values = size_t(rows) * width;
        Rows result{};
        result.codes = reinterpret_cast<int8_t*>(memory);
        result.fine = result.codes + values;
        result.groups = reinterpret_cast<RowGroup*>(result.fine + values);
        result.fine_groups = result.groups + values / GROUP;
        result.rows = rows;
        result.width = width;
        return result;
    }
    // Rows of the block that a row lies in: the distance of two groups.
    size_t beside(int row) const { return std::min(ROW_BLOCK, rows - row / ROW_BLOCK * ROW_BLOCK); }
    size_t at(int row, int group) const {
        return size_t(row / ROW_BLOCK * ROW_BLOCK) * (width / GROUP) + group * beside(row) + row % ROW_BLOCK;
    }
};

// Arguments of one product y = x W^T; the same fields, in the same order, as in native.py.
struct LinearCall {
    Linear linear;
    const float* x;  // [rows, inputs]
    float* y;        // [rows, outputs padded to panels]
    int32_t rows, threads;
};

}  // namespace edgellm
