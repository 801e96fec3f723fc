// Quantized linear layers in panels; the layout is described in panels.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgellm {

constexpr int GROUP = 32;   // inputs that share a scale
constexpr int PANEL = 16;   // outputs that lie side by side
constexpr int ROW_BLOCK = 16;  // rows that a tile of AMX takes in

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

// One group of a row of activations: value = scale * code, or with the fine code as well, see
// quantize_rest in ../cpu/quantize.h.
struct Group {
    float scale;
    float shift[2];  // scale * (sum of the codes), without and with the fine codes
    // What sums of products start from, see ZERO: of signed codes, of codes 0 .. 15 around 8 and of
    // codes 0 .. 31 around 16; then of each half of a group of codes 0 .. 63 around 32.
    int32_t start[3], start_of_half[2];
    int32_t fine_start[3], fine_start_of_half[2];
};

// The factors of one group of a block of rows once more, side by side: kernels for tiles alone read them.
struct RowFactors {
    float scale[ROW_BLOCK], shift[ROW_BLOCK];  // without the fine codes
};

// Quantized activations.
struct Rows {
    int8_t *codes, *fine;  // [rows, width]
    Group* groups;         // [rows, width / GROUP]
    RowFactors* factors;   // [rows / ROW_BLOCK, width / GROUP]
    int32_t width;

    static size_t factor_count(int rows, int width) {
        return size_t((rows + ROW_BLOCK - 1) / ROW_BLOCK) * (width / GROUP);
    }
    static size_t bytes(int rows, int width) {
        const size_t values = size_t(rows) * width, factors = factor_count(rows, width) * sizeof(RowFactors);
        return (2 * values + values / GROUP * sizeof(Group) + factors + 255) / 64 * 64;
    }
    static Rows in(char* memory, int rows, int width) {
        const size_t values = size_t(rows) * width;
        Rows result{};
        result.factors = reinterpret_cast<RowFactors*>(memory);
        result.groups = reinterpret_cast<Group*>(result.factors + factor_count(rows, width));
        result.codes = reinterpret_cast<int8_t*>(result.groups + values / GROUP);
        result.fine = result.codes + values;
        result.width = width;
        return result;
    }
    Rows from(size_t row) const {
        Rows result = *this;
        result.codes += row * width;
        result.fine += row * width;
        result.groups += row * (width / GROUP);
        result.factors += row / ROW_BLOCK * (width / GROUP);  // where a block begins with the row
        return result;
    }
    Rows from_group(int group) const {
        Rows result = *this;
        result.codes += size_t(group) * GROUP;
        result.fine += size_t(group) * GROUP;
        result.groups += group;
        result.factors += group;
        return result;
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
