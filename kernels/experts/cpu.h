// The experts of a layer; included once for each instruction set.
//
// A slot is a row in an expert. Slots of an expert lie side by side in the order of the rows, and are computed together
// as the rows of a layer with one MLP are, so a slot's bits do not depend on the others. A row adds up its slots in the
// order of the experts.

// The experts of a row and their shares, by their scores, of which it marks the chosen ones. NaN chooses experts as
// well, and shows in what they give.
inline void choose(const edgellm::Router& router, float* score, int32_t* expert, float* share) {
    float top = score[0];
    for (int e = 1; e < router.experts; ++e) top = score[e] > top ? score[e] : top;
    float all = 0;
    for (int e = 0; e < router.experts; ++e) {
        score[e] = std::exp(score[e] - top);
        all += score[e];
    }
    constexpr float CHOSEN = -1;
    float sum = 0;
    for (int k = 0; k < router.used; ++k) {
        int best = -1;
        for (int e = 0; e < router.experts; ++e)
            if (score[e] != CHOSEN && (best < 0 || score[e] > score[best])) best = e;
        const float value = score[best];
        score[best] = CHOSEN;
        sum += value;
        int at = k;
        for (; at > 0 && expert[at - 1] > best; --at) expert[at] = expert[at - 1], share[at] = share[at - 1];
        expert[at] = best;
        share[at] = value;
    }
    const float whole = router.normalized ? sum : all;
    for (int k = 0; k < router.used; ++k) share[k] *= router.scale / whole;
}

// Experts of the layers of a step, with buffers that one layer after the other uses; layers may have others.
class Experts {
public:
    Experts() = default;

    // Cut buffers for `rows` rows out of the workspace with `take(bytes)`, if a layer has experts.
    template <typename Take>
    Experts(const edgellm::Transformer& model, int rows, int threads, const Take& take)
        : rows_(rows), hidden_(model.hidden), threads_(threads) {
        size_t experts = 0, slots = 0, width = 0;
        for (int l = 0; l < model.layer_count; ++l) {
            const edgellm::Layer& layer = model.layers[l];
            if (!layer.has_experts()) continue;
            experts = std::max<size_t>(experts, layer.router.experts);
            slots = std::max<size_t>(slots, size_t(rows) * layer.router.used);
            width = std::max<size_t>(width, layer.up.outputs / layer.router.experts);
        }
        if (experts == 0) return;
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        const auto whole = [&](size_t count) { return reinterpret_cast<int32_t*>(take(4 * count)); };
        const auto quantized = [&](size_t inputs) {  // the rows of each expert begin with a cache line
            return take(edgellm::Rows::bytes(static_cast<int>(slots), static_cast<int>(inputs)) + 256 * experts);
        };
        normed_ = floats(size_t(rows) * hidden_);
        scores_ = floats(rows * experts);
        out_ = floats(slots * hidden_);
        share_ = floats(slots);
        expert_ = whole(slots);
        slot_ = whole(slots);
        row_ = whole(slots);
        first_ = whole(experts + 1);
        active_ = whole(experts);
        active_count_ = whole(1);
        x_ = quantized(hidden_);
        activated_ = quantized(width);
    }

    // Where the normalized row of the residual is to be.
    float* normed(int r) const { return normed_ + size_t(r) * hidden_; }

    // Take the normalized rows through the experts that the router chooses for each.
    void run(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        score(worker, layer.router);
        worker.each(1, [&](int) { route(layer.router); });
        const int slots = rows_ * layer.router.used, some = std::max(1, std::min(16, slots / (4 * threads_)));
        worker.each((slots + some - 1) / some, [&](int item) {
            for (int s = item * some; s < std::min(slots, (item + 1) * some); ++s) quantize(layer.router, s);
        });
        const int width = layer.up.outputs / layer.router.experts, groups = width / edgellm::GROUP;
        const int inner = std::max(1, panels_at_once(part(layer.up, layer.router, 0), 1, threads_) / 2);
        each_active(worker, layer.router, (groups + inner - 1) / inner, [&](int e, int run) {
            const int first = run * inner, end = std::min(groups, first + inner);
            activate_groups(layer, layer.gated() ? part(layer.gate, layer.router, e) : layer.gate,
                            part(layer.up, layer.router, e), first, end, rows_of(x_, hidden_, e), count(e),
                            rows_of(activated_, width, e));
        });
        // in pairs, or one of each two would be thrown away where an expert has many rows
        const int pairs = (panels_at_once(part(layer.down, layer.router, 0), 1, threads_) + WIDE_PANELS - 1) / WIDE_PANELS;
        const int panels = hidden_ / edgellm::PANEL, outer = pairs * WIDE_PANELS;
        each_active(worker, layer.router, (panels + outer - 1) / outer, [&](int e, int run) {
            const int first = run * outer, end = std::min(panels, first + outer);
            multiply_panels(part(layer.down, layer.router, e), first, end, rows_of(activated_, width, e), count(e),
                            out_ + size_t(first_[e]) * hidden_ + size_t(first) * edgellm::PANEL, hidden_, false);
        });
    }

    // y (+)= what the experts of a row give, by their shares
    void sum(const edgellm::Router& router, int r, float* y, bool add) const {
        const size_t at = size_t(r) * router.used;
        for (int i = 0; i < hidden_; i += LANES) {
            Vec sum = add ? load(y + i) : Vec{};
            for (int k = 0; k < router.used; ++k)
                sum += splat(share_[at + k]) * load(out_ + size_t(slot_[at + k]) * hidden_ + i);
            store(y + i, sum);
        }
    }

private:
    static edgellm::Linear part(edgellm::Linear all, const edgellm::Router& router, int expert) {
        all.outputs /= router.experts;
        all.panels += size_t(expert) * all.count() * all.panel_bytes();
        return all;
    }

    int count(int expert) const { return first_[expert + 1] - first_[expert]; }

    // The quantized rows of an expert: whole cache lines behind those of the experts before.
    edgellm::Rows rows_of(char* memory, int width, int expert) const {
        const size_t before = edgellm::Rows::bytes(first_[expert], width) + 192 * size_t(expert);
        return edgellm::Rows::in(memory + before / 64 * 64, count(expert), width);
    }

    // The router's products, some experts at a time.
    void score(edgellm::Worker& worker, const edgellm::Router& router) const {
        constexpr int RUN = 8;
        worker.each((router.experts + RUN - 1) / RUN, [&](int item) {
            for (int r = 0; r < rows_; ++r)
                for (int e = item * RUN; e < std::min(router.experts, (item + 1) * RUN); ++e) {
                    const float *weight = router.weight + size_t(e) * hidden_, *x = normed(r);
                    Vec sum = {};
                    for (int i = 0; i < hidden_; i += LANES) sum += load(x + i) * load(weight + i);
                    scores_[size_t(r) * router.experts + e] = sum_of(sum);
                }
        });
    }

    // Choose the experts of all rows, and give each a slot.
    void route(const edgellm::Router& router) const {
        const int slots = rows_ * router.used;
        std::fill(first_, first_ + router.experts + 1, 0);
        for (int r = 0; r < rows_; ++r) {
            const size_t at = size_t(r) * router.used;
            choose(router, scores_ + size_t(r) * router.experts, expert_ + at, share_ + at);
            for (int k = 0; k < router.used; ++k) ++first_[expert_[at + k] + 1];
        }
        *active_count_ = 0;
        for (int e = 0; e < router.experts; ++e) {
            if (first_[e + 1] > 0) active_[(*active_count_)++] = e;
            first_[e + 1] += first_[e];
        }
        for (int i = 0; i < slots; ++i) row_[slot_[i] = first_[expert_[i]]++] = i / router.used;
        for (int e = router.experts; e > 0; --e) first_[e] = first_[e - 1];  // they had moved to the ends
        first_[0] = 0;
    }

    void quantize(const edgellm::Router& router, int slot) const {
        const int expert = static_cast<int>(std::upper_bound(first_, first_ + router.experts + 1, slot) - first_) - 1;
        quantize_groups(normed(row_[slot]), 0, hidden_ / edgellm::GROUP, rows_of(x_, hidden_, expert),
                        slot - first_[expert], false);
    }

    // Items of the experts that have slots: body(expert, 0) .. body(expert, runs - 1). There are as many items as
    // could be needed: a worker that comes late must not count by what the next layer's router has left.
    template <typename Body>
    void each_active(edgellm::Worker& worker, const edgellm::Router& router, int runs, const Body& body) const {
        worker.each(std::min(router.experts, rows_ * router.used) * runs, [&](int item) {
            if (item / runs < *active_count_) body(active_[item / runs], item % runs);
        });
    }

    int rows_ = 0, hidden_ = 0, threads_ = 1;
    float *normed_ = nullptr, *scores_ = nullptr;   // [rows, hidden], [rows, experts]
    float *out_ = nullptr, *share_ = nullptr;       // [slots, hidden], [rows, used]
    int32_t *expert_ = nullptr, *slot_ = nullptr;   // [rows, used], experts in ascending order
    int32_t *row_ = nullptr, *first_ = nullptr;     // [slots], [experts + 1]: the first slot of each
    int32_t *active_ = nullptr, *active_count_ = nullptr;  // experts that have slots
    char *x_ = nullptr, *activated_ = nullptr;      // quantized rows of each expert
};
