// What a mixer that keeps a state works on: the rows of a step, one span behind the other.
#pragma once

#include <vector>

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

// Rows that go through a mixer by themselves, apart from a step.
class RowsAlone {
public:
    RowsAlone(const StateRows* given, int span_count, int rows, int threads)
        : states_(span_count), spans_(span_count), places_{{{0, 0}}, {}, {}} {
        for (int s = 0; s < span_count; ++s) {
            states_[s] = {given[s].source, given[s].targets};
            spans_[s].states = &states_[s];
            spans_[s].rows = given[s].rows;
            places_.spans.push_back({places_.spans.back().row + given[s].rows, 0});
        }
        call_.spans = spans_.data();
        call_.span_count = span_count;
        call_.count = rows;
        call_.threads = threads;
    }
    RowsAlone(const RowsAlone&) = delete;

    Mixing mixing(const float* in, int step) const { return {call_, places_, 0, 0, in, size_t(step), {}}; }

private:
    std::vector<StateSpan> states_;
    std::vector<Span> spans_;
    Places places_;
    StepCall call_{};
};

}  // namespace edgellm
