// Where the rows of each span of a step are among those of all.
#pragma once

#include <vector>

#include "call.h"

namespace edgellm {

// Where a span's rows, logits, attention tasks and sums begin. Few rows over many keys: every split of the
// keys is a task of its own. Many rows are tasks enough.
struct Place {
    int row, logit, task, runs, splits;
    size_t part;
};

// Those of all spans, and behind the last one the totals.
inline std::vector<Place> places_of(const StepCall& call) {
    const int kv_heads = call.pools[0].kv_heads, heads = call.model->heads;
    std::vector<Place> places(1);
    for (int s = 0; s < call.span_count; ++s) {
        const Span& span = call.spans[s];
        Place& place = places.back();
        place.runs = (span.rows * (heads / kv_heads) + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
        place.splits = place.runs > 1 ? 1 : split_count(span.start + span.rows);
        const Place next{place.row + span.rows,
                         place.logit + span.logit_rows,
                         place.task + kv_heads * place.runs * place.splits,
                         0,
                         0,
                         place.part + size_t(place.splits) * span.rows * heads};
        places.push_back(next);
    }
    return places;
}

}  // namespace edgellm
