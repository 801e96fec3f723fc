// The experts of a layer; included once for each instruction set.
//
// A slot is a row in an expert. Slots of an expert lie side by side in the order of the rows, and are computed together
// as the rows of a layer with one MLP are, so a slot's bits do not depend on the others. A row adds up its slots in the
// order of the experts.

// Take the experts of all groups but the best out of a choice by rank. A group is as good as its best expert or, of
// sigmoids, as its best two together. `worth` has room for a number of each group.
inline void keep_groups(const edgellm::Router& router, float* rank, float* worth) {
    const int size = router.experts / router.groups;
    for (int g = 0; g < router.groups; ++g) {
        float best = -INFINITY, next = -INFINITY;
        for (const float* at = rank + g * size; at < rank + (g + 1) * size; ++at) {
            if (*at > best)
                next = best, best = *at;
            else if (*at > next)
                next = *at;
        }
        worth[g] = router.sigmoid && size > 1 ? best + next : best;
    }
    for (int k = router.used_groups; k < router.groups; ++k) {
        int worst = -1;
        for (int g = 0; g < router.groups; ++g)
            if (worth[g] != INFINITY && (worst < 0 || worth[g] <= worth[worst])) worst = g;
        if (worst < 0) break;  // selections of a damaged file may be infinite
        worth[worst] = INFINITY;
        std::fill(rank + worst * size, rank + (worst + 1) * size, -INFINITY);
    }
}

// The experts of a row and their shares, by their logits, which become scores. NaN chooses experts as well, and shows
// in what they give.
inline void choose(const edgellm::Router& router, float* score, int32_t* expert, float* share) {
    float top = score[0], all = 0;
    for (int e = 1; e < router.experts; ++e) top = score[e] > top ? score[e] : top;
    for (int e = 0; e < router.experts; ++e) {
        score[e] = router.sigmoid ? 1 / (1 + std::exp(-score[e])) : std::exp(score[e] - top);
        all += score[e];
    }
    float* rank = static_cast<float*>(edgellm::scratch(4 * size_t(router.experts + router.groups)));  // -INFINITY of those that are not to choose any more
    if (router.selection && !router.sigmoid) {  // which is added to what the softmax gives
        for (int e = 0; e < router.experts; ++e) score[e] /= all;
        all = 1;
    }
    for (int e = 0; e < router.experts; ++e) {
        rank[e] = score[e] + (router.selection ? router.selection[e] : 0);
        if (rank[e] < -FLT_MAX) rank[e] = -FLT_MAX;  // of a bias in a file
    }
    if (router.groups > 1) keep_groups(router, rank, rank + router.experts);
    float sum = 0;
    for (int k = 0; k < router.used; ++k) {
        int best = -1;
        for (int e = 0; e < router.experts; ++e)
            if (rank[e] != -INFINITY && (best < 0 || rank[e] > rank[best])) best = e;
        rank[best] = -INFINITY;
        sum += score[best];
        int at = k;
        for (; at > 0 && expert[at - 1] > best; --at) expert[at] = expert[at - 1], share[at] = share[at - 1];
        expert[at] = best;
        share[at] = score[best];
    }
    const float whole = router.normalized ? sum : router.sigmoid ? 1 : all;
    for (int k = 0; k < router.used; ++k)
        share[k] *= router.scale / whole * (router.scales ? router.scales[expert[k]] : 1);
}

// Experts of the layers of a step, with buffers that one layer after the other uses; layers may have others.
class Experts {
public:
    Experts() = default;

    // Cut buffers for `rows` rows out of the workspace with `take(bytes)`, if a layer has experts.
    template <typename Take>
    Experts(const edgellm::Transformer& model, int rows, int threads, const Take& take)
        : rows_(rows), hidden_(model.hidden), threads_(threads) {
        size_t experts = 0, slots = 0, width = 0, shared = 0;
        bool routed = false;
        for (int l = 0; l < model.layer_count; ++l) {
            const edgellm::Layer& layer = model.layers[l];
            if (!layer.has_experts()) continue;
            experts = std::max<size_t>(experts, layer.router.experts);
            slots = std::max<size_t>(slots, size_t(rows) * layer.router.used);
            width = std::max<size_t>(width, layer.up.outputs / layer.router.experts);
            shared = std::max<size_t>(shared, layer.shared.up.outputs);
            routed = routed || layer.shared.router_norm;
        }
        if (experts == 0) return;
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        const auto whole = [&](size_t count) { return reinterpret_cast<int32_t*>(take(4 * count)); };
        const auto quantized = [&](size_t inputs) {  // the rows of each expert begin with a cache line
            return take(edgellm::Rows::bytes(static_cast<int>(slots), static_cast<int>(inputs)) + 256 * experts);
        };
        normed_ = floats(size_t(rows) * hidden_);
        routed_ = routed ? floats(size_t(rows) * hidden_) : nullptr;
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
        if (shared == 0) return;
        shared_out_ = floats(size_t(rows) * hidden_);
        shared_share_ = floats(rows);
        shared_activated_ = take(edgellm::Rows::bytes(rows, static_cast<int>(shared)));
    }

    // Where the normalized row of the residual is to be.
    float* normed(int r) const { return normed_ + size_t(r) * hidden_; }

    // Where the row that the router reads is to be, in a layer whose router has a norm of its own.
    float* routed(int r) const { return routed_ + size_t(r) * hidden_; }

    // The rows that experts beside an MLP and their router read, of a row of the residual.
    void read_beside(const edgellm::Layer& layer, float epsilon, const float* x, int r) const {
        scaled_norm(x, {layer.shared.experts_norm, nullptr}, hidden_, epsilon, normed(r));
        scaled_norm(x, {layer.shared.router_norm, nullptr}, hidden_, epsilon, routed(r));
    }

    // What they and the MLP give together, which the norm behind the layer's MLPs takes.
    void sum_beside(const edgellm::Layer& layer, float epsilon, int r, float* y) const {
        float* one = static_cast<float*>(edgellm::scratch(4 * size_t(hidden_)));
        sum(layer, r, one, false);
        scaled_norm(one, {layer.shared.experts_post_norm, nullptr}, hidden_, epsilon, y);
        scaled_norm(shared_out(r), {layer.shared.post_norm, nullptr}, hidden_, epsilon, one);
        add_to(y, one, hidden_);
    }

    // What the shared expert gives for a row.
    const float* shared_out(int r) const { return shared_out_ + size_t(r) * hidden_; }

    // Take the normalized rows through the experts that the router chooses for each, and through the shared one.
    // `x` are the rows quantized, for the shared expert alone, which adapters may change.
    void run(edgellm::Worker& worker, const edgellm::Transformer& model, int number, const edgellm::Rows& x,
             const Adapters& adapters = {}) const {
        const edgellm::Layer& layer = model.layers[number];
        score(worker, layer);
        worker.each(1, [&](int) {
            route(layer.router);
            if (model.expert_memory) edgellm::use_experts(model, number, active_, *active_count_, held_);
        });
        const int slots = rows_ * layer.router.used, some = std::max(1, std::min(16, slots / (4 * threads_)));
        worker.each((slots + some - 1) / some, [&](int item) {
            for (int s = item * some; s < std::min(slots, (item + 1) * some); ++s) quantize(layer.router, s);
        });
        const edgellm::SharedExpert& shared = layer.shared;
        const edgellm::Rows middle = edgellm::Rows::in(shared_activated_, rows_, shared.up.outputs);
        const int width = layer.up.outputs / layer.router.experts;
        each_active(
            worker, layer.router,
            runs_of(width / edgellm::GROUP, std::max(1, panels_at_once(part(layer.up, layer.router, 0), 1, threads_) / 2)),
            runs_of(shared.up.outputs / edgellm::GROUP, std::max(1, at_once(shared.up) / 2)),
            [&](int e, int first, int end) {
                activate_groups(mlp_of(layer, e), first, end, rows_of(x_, hidden_, e), count(e),
                                rows_of(activated_, width, e));
            },
            [&](int first, int end) {
                const Readers in = shared_readers(layer);
                activate_groups({shared.gate, shared.up, nullptr, nullptr, layer.activation,
                                 in.of(&edgellm::LayerChanges::shared_gate), in.of(&edgellm::LayerChanges::shared_up)},
                                first, end, x, rows_, middle, adapters);
            });
        const Readers down{&layer, shared.down.inputs, {&edgellm::LayerChanges::shared_down}};
        if (shared.down.panels) adapters.shrink(worker, down);
        // in pairs, or one of each two would be thrown away where an expert has many rows
        const int pairs = (panels_at_once(part(layer.down, layer.router, 0), 1, threads_) + WIDE_PANELS - 1) / WIDE_PANELS;
        const int panels = hidden_ / edgellm::PANEL;
        each_active(
            worker, layer.router, runs_of(panels, pairs * WIDE_PANELS),
            runs_of(shared.down.panels ? panels : 0, at_once(shared.down)),
            [&](int e, int first, int end) {
                multiply_panels(part(layer.down, layer.router, e), first, end, rows_of(activated_, width, e), count(e),
                                out_ + size_t(first_[e]) * hidden_ + size_t(first) * edgellm::PANEL, hidden_, false);
            },
            [&](int first, int end) {
                multiply_changed(shared.down, down.of(&edgellm::LayerChanges::shared_down), adapters, first, end, middle,
                                 rows_, shared_out_ + size_t(first) * edgellm::PANEL, hidden_, false);
            });
    }

    // Note that the step has ended, in all its threads.
    void leave(const edgellm::Transformer& model) const {
        if (model.expert_memory) edgellm::leave_experts(model, held_);
    }

    // y (+)= what the experts of a row give, by their shares, and the shared one unless it has a norm behind it
    void sum(const edgellm::Layer& layer, int r, float* y, bool add) const {
        const size_t at = size_t(r) * layer.router.used;
        for (int i = 0; i < hidden_; i += LANES) {
            Vec sum = add ? load(y + i) : Vec{};
            for (int k = 0; k < layer.router.used; ++k) {
                Vec value = load(out_ + size_t(slot_[at + k]) * hidden_ + i);
                if (layer.down_bias) value += load(layer.down_bias + size_t(expert_[at + k]) * hidden_ + i);
                sum += splat(share_[at + k]) * value;
            }
            if (layer.shared.up.panels && !layer.shared.post_norm) {
                const Vec value = load(shared_out(r) + i);
                sum += layer.shared.router ? splat(shared_share_[r]) * value : value;
            }
            store(y + i, sum);
        }
    }

    // What of the shared expert reads the normalized row.
    Readers shared_readers(const edgellm::Layer& layer) const {
        if (!layer.shared.up.panels) return {};
        return {&layer, hidden_, {&edgellm::LayerChanges::shared_gate, &edgellm::LayerChanges::shared_up}};
    }

private:
    static edgellm::Linear part(const edgellm::Linear& all, const edgellm::Router& router, int expert) {
        return edgellm::expert_of(all, router.experts, expert);
    }

    static Mlp mlp_of(const edgellm::Layer& layer, int expert) {
        const size_t first = size_t(expert) * (layer.up.outputs / layer.router.experts);
        const auto of = [&](const float* bias) { return bias ? bias + first : nullptr; };
        return {part(layer.gate, layer.router, expert), part(layer.up, layer.router, expert), of(layer.gate_bias),
                of(layer.up_bias), layer.activation};
    }

    int count(int expert) const { return first_[expert + 1] - first_[expert]; }

    // The quantized rows of an expert: whole cache lines behind those of the experts before.
    edgellm::Rows rows_of(char* memory, int width, int expert) const {
        const size_t before = edgellm::Rows::bytes(first_[expert], width) + 192 * size_t(expert);
        return edgellm::Rows::in(memory + before / 64 * 64, count(expert), width);
    }

    float product(const float* weight, const float* x) const {
        Vec sum = {};
        for (int i = 0; i < hidden_; i += LANES) sum += load(x + i) * load(weight + i);
        return sum_of(sum);
    }

    // The router's products, some experts at a time, and the share of the shared expert.
    void score(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        constexpr int RUN = 8;
        const edgellm::Router& router = layer.router;
        const int runs = (router.experts + RUN - 1) / RUN;
        worker.each(runs + (layer.shared.router ? 1 : 0), [&](int item) {
            for (int r = 0; r < rows_; ++r) {
                if (item == runs) shared_share_[r] = 1 / (1 + std::exp(-product(layer.shared.router, normed(r))));
                const float* x = layer.shared.router_norm ? routed(r) : normed(r);
                for (int e = item * RUN; e < std::min(router.experts, (item + 1) * RUN); ++e)
                    scores_[size_t(r) * router.experts + e] =
                        product(router.weight + size_t(e) * hidden_, x) + (router.bias ? router.bias[e] : 0);
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

    // So many panels or groups, some in each item.
    struct Runs {
        int all, some;
        int count() const { return (all + some - 1) / some; }
        int first(int run) const { return run * some; }
        int end(int run) const { return std::min(all, first(run) + some); }
    };
    static Runs runs_of(int all, int some) { return {all, some}; }

    // Panels of the shared expert in an item; 1 where there is none.
    int at_once(const edgellm::Linear& linear) const {
        return linear.panels ? panels_at_once(linear, rows_, threads_) : 1;
    }

    // Items of the shared expert, shared_body(first, end), and of the experts that have slots, body(expert, first, end).
    // There are as many items as could be needed: a worker that comes late must not count by what the next layer's
    // router has left.
    template <typename Body, typename SharedBody>
    void each_active(edgellm::Worker& worker, const edgellm::Router& router, const Runs& runs, const Runs& shared,
                     const Body& body, const SharedBody& shared_body) const {
        const int before = shared.count(), each = runs.count();
        worker.each(before + std::min(router.experts, rows_ * router.used) * each, [&](int item) {
            if (item < before) return shared_body(shared.first(item), shared.end(item));
            const int active = (item - before) / each, run = (item - before) % each;
            if (active < *active_count_) body(active_[active], runs.first(run), runs.end(run));
        });
    }

    int rows_ = 0, hidden_ = 0, threads_ = 1;
    float *normed_ = nullptr, *routed_ = nullptr;   // [rows, hidden]
    float* scores_ = nullptr;                       // [rows, experts]
    float *out_ = nullptr, *share_ = nullptr;       // [slots, hidden], [rows, used]
    int32_t *expert_ = nullptr, *slot_ = nullptr;   // [rows, used], experts in ascending order
    int32_t *row_ = nullptr, *first_ = nullptr;     // [slots], [experts + 1]: the first slot of each
    int32_t *active_ = nullptr, *active_count_ = nullptr;  // experts that have slots
    char *x_ = nullptr, *activated_ = nullptr;      // quantized rows of each expert
    float *shared_out_ = nullptr, *shared_share_ = nullptr;  // [rows, hidden], [rows]
    char* shared_activated_ = nullptr;              // quantized rows of the shared expert
    mutable edgellm::HeldExperts held_;             // changed by one worker, in a phase of its own
};
