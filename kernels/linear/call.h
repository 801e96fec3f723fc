// Quantized linear layers in panels; the layout is described in panels.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgellm {

constexpr int GROUP = 32;   // inputs that share a scale
constexpr int PANEL = 16;   // outputs that lie side by side

enum Kind : int32_t { INT4_SYMMETRIC = 0, INT4_AFFINE = 1, INT8_SYMMETRIC = 2 };

// Bytes of one group of a panel: codes, 16 half-precision scales, with INT4_AFFINE 16 offsets.
constexpr size_t group_bytes(int kind) {
    return kind == INT8_SYMMETRIC ? 544 : kind == INT4_AFFINE ? 320 : 288;
}

// A weight [outputs, inputs]; outputs padded to whole panels with zeros. Outputs from `fine_from` on
// are computed with activations of 16 bits instead of 8.
struct Linear {
    const uint8_t* panels;
    int32_t outputs, inputs, kind, fine_from;

    int count() const { return (outputs + PANEL - 1) / PANEL; }
    size_t panel_bytes() const { return inputs / GROUP * group_bytes(kind); }
    const uint8_t* panel(int index) const { return panels + index * panel_bytes(); }
    bool any_fine() const { return fine_from < outputs; }
    int first_fine() const { return any_fine() ? fine_from / PANEL : count(); }  // a panel
};

// One group of a row of activations: value = scale * code, or with the fine code as well, see
// quantize_rest in ../cpu/quantize.h.
struct Group {
    float scale;
    float shift[2];    // scale * (sum of the codes), without and with the fine codes
    int32_t start[2];  // what sums of int8 and of symmetric int4 products start from, see ZERO
    int32_t fine_start[2];
};

// Quantized activations.
struct Rows {
    int8_t *codes, *fine;  // [rows, width]
    Group* groups;         // [rows, width / GROUP]
    int32_t width;

    static size_t bytes(int rows, int width) {
        const size_t values = size_t(rows) * width;
        return (2 * values + values / GROUP * sizeof(Group) + 255) / 64 * 64;
    }
    static Rows in(char* memory, int rows, int width) {
        const size_t values = size_t(rows) * width;
        Rows result{};
        result.groups = reinterpret_cast<Group*>(memory);
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
        return result;
    }
    Rows from_group(int group) const {
        Rows result = *this;
        result.codes += size_t(group) * GROUP;
        result.fine += size_t(group) * GROUP;
        result.groups += group;
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
