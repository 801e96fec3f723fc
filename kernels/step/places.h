// Where the rows of each span of a step are among those of all, and its tasks of attention.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"

namespace edgellm {

// Where a span's rows and logits begin.
struct Place {
    int row, logit;
};

// Where a span's attention tasks and sums begin, in layers with as many heads. Few rows over many keys: every
// split of the keys is a task of its own. Many rows are tasks enough. Tokens that choose what they read are apart.
struct Tasks {
    int first, runs, splits, run;  // run: rows of a task
    size_t part;
    bool chooses;
};

// Heads of attention, and the tasks of all spans in layers that have them; behind the last one the totals.
struct Heads {
    int heads, kv_heads, head_dim, key_dim, value_dim, group;  // group: query heads of each KV head
    int pool;      // of their layers
    bool chooses;  // whether rows may read a part of what they see
    bool sparse;   // whether whole blocks of rows may
    std::vector<Tasks> spans;

    int width() const { return heads * key_dim; }
    int tasks() const { return spans.back().first; }
    size_t floats() const { return spans.back().part * (value_dim + 2); }
};

struct Places {
    std::vector<Place> spans;  // behind the last one the totals
    std::vector<Heads> kinds;  // those that layers have
    std::vector<int> kind_of;  // of each layer that attends
    int chosen = 0;            // blocks that a row may choose at most, or numbers of the list of a block of rows
    int choosing = 0;          // rows, or blocks of them, whose heads have a place for what they choose
    bool sparse = false;       // whether blocks of rows choose
};

inline Heads heads_of(const StepCall& call, const Layer& layer, bool chooses, bool sparse) {
    const KV& kv = call.pools[layer.pool];
    const int heads = layer.heads;
    Heads result{heads, kv.kv_heads, kv.head_dim, kv.key_dim(), kv.value_dim(), heads / kv.kv_heads,
                 layer.pool, chooses, sparse, {{}}};
    result.spans.reserve(call.span_count + 1);
    for (int s = 0; s < call.span_count; ++s) {
        const Span& span = call.spans[s];
        Tasks& tasks = result.spans.back();
        const int rows = span.rows * result.group, last = span.start + span.rows - 1;
        tasks.chooses = chooses && span.chooses();
        tasks.run = tasks.chooses ? result.group : sparse && span.chooses_panels() ? ROWS_BY_HEAD : ROWS_PER_TASK;
        tasks.runs = (rows + tasks.run - 1) / tasks.run;
        BlockList blocks = blocks_seen(kv, last, 0, 0);
        if (span.heads) blocks.count += span.heads[layer.pool].most - span.heads[layer.pool].first;
        if (tasks.chooses) blocks.count = blocks_read(last, span.kv_read);
        tasks.splits = rows > ROWS_PER_TASK ? 1 : blocks.splits();
        const Tasks next{tasks.first + kv.kv_heads * tasks.runs * tasks.splits, 0, 0, 0,
                         tasks.part + size_t(tasks.splits) * span.rows * heads, false};
        result.spans.push_back(next);
    }
    return result;
}

inline Places places_of(const StepCall& call) {
    Places places{{{0, 0}}, {}, {}};
    places.choosing = call.count;
    places.spans.reserve(call.span_count + 1);
    places.kind_of.reserve(call.model->layer_count);
    for (int s = 0; s < call.span_count; ++s) {
        const Place& last = places.spans.back();
        places.spans.push_back({last.row + call.spans[s].rows, last.logit + call.spans[s].logit_rows});
        if (call.spans[s].chooses()) places.chosen = std::max(places.chosen, call.spans[s].kv_read / BLOCK);
        if (call.spans[s].chooses_panels()) {  // in layers whose blocks rows do not choose one by one
            places.sparse = true;
            places.choosing = call.count / BLOCK + 1;
            const size_t stride = PanelLists::stride_for(call.spans[s].sparse_blocks());
            places.chosen = std::max(places.chosen, int(stride));
        }
    }
    for (int l = 0; l < call.model->layer_count; ++l) {
        const Layer& layer = call.model->layers[l];
        if (!layer.attends()) {
            places.kind_of.push_back(-1);
            continue;
        }
        const KV& kv = call.pools[layer.pool];
        const bool chooses = places.chosen > 0 && !places.sparse && l >= DENSE_LAYERS && kv.seals();
        // rows of layers that read K and V of others may be there alone, whose block is not
        const bool sparse = places.sparse && layer.window == 0 && layer.has_own_kv();
        const auto alike = std::find_if(places.kinds.begin(), places.kinds.end(), [&](const Heads& each) {
            return each.heads == layer.heads && each.kv_heads == kv.kv_heads && each.head_dim == kv.head_dim &&
                   each.key_dim == kv.key_dim() && each.pool == layer.pool && each.chooses == chooses &&
                   each.sparse == sparse;
        });
        places.kind_of.push_back(static_cast<int>(alike - places.kinds.begin()));
        if (alike == places.kinds.end()) places.kinds.push_back(heads_of(call, layer, chooses, sparse));
    }
    return places;
}

}  // namespace edgellm
