// What a mixer that keeps a state works on: the rows of a step, one span behind the other.
#pragma once

#include "call.h"
#include "places.h"

namespace edgellm {

struct Mixing {
    const StepCall& call;
    const Places& places;
    int pool;
    size_t state;     // where the layer's state begins in a block
    const float* in;  // [rows, step], outputs of the input projections
    size_t step;
    Rows out;  // what the output projection reads, quantized by the mixer

    int span_count() const { return call.span_count; }
    const float* row(int r) const { return in + r * step; }

    // The state before the first row of a span; null: all zeros.
    const float* before(int span) const {
        const float* block = call.spans[span].states[pool].source;
        return block ? block + state : nullptr;
    }

    // row(r) for each row of a span in order, and save(state) after those whose state is to be kept.
    template <typename Row, typename Save>
    void walk(int span, const Row& row, const Save& save) const {
        const StateTarget* target = call.spans[span].states[pool].targets;
        for (int first = places.spans[span].row, i = 0; i < call.spans[span].rows; ++i) {
            row(first + i);
            if (i + 1 == target->rows) save(target++->block + state);
        }
    }
};

}  // namespace edgellm
