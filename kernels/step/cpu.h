// All layers of a few tokens in one call; included once for each instruction set.

// Buffers of a step, cut out of the caller's workspace. Each begins with a cache line, so that threads
// do not write to each other's.
struct Buffers {
    float *residual, *branch, *qkv, *q, *parts;  // branch: what a norm takes before it is added
    edgellm::Rows x;
    char *attended, *activated;  // rows of each layer's width
    Experts experts;

    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

    Buffers(const edgellm::StepCall& call, const edgellm::Places& places, char* memory, size_t& bytes) {
        const edgellm::Transformer& m = *call.model;
        const int rows = call.count;
        int qkv_outputs = 0, width = 0, intermediate = 0;
        bool behind = false;
        for (int l = 0; l < m.layer_count; ++l) {
            const edgellm::Layer& layer = m.layers[l];
            qkv_outputs = std::max(qkv_outputs, layer.qkv_outputs());
            width = std::max(width, layer.q.outputs);
            if (!layer.has_experts()) intermediate = std::max(intermediate, layer.up.outputs);
            behind = behind || layer.post_attention_norm.weight || layer.post_mlp_norm.weight;
        }
        size_t sums = 0;
        for (const edgellm::Heads& heads : places.kinds) sums = std::max(sums, heads.floats());
        const auto take = [&](size_t size) {
            char* taken = memory + bytes;
            bytes += aligned(size);
            return taken;
        };
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        residual = floats(size_t(rows) * m.hidden);
        branch = behind ? floats(size_t(rows) * m.hidden) : nullptr;
        qkv = floats(size_t(rows) * qkv_outputs);
        q = floats(size_t(rows) * width);
        parts = floats(sums);
        x = edgellm::Rows::in(take(edgellm::Rows::bytes(rows, m.hidden)), rows, m.hidden);
        attended = take(edgellm::Rows::bytes(rows, width));
        activated = take(edgellm::Rows::bytes(rows, intermediate));
        experts = Experts(m, rows, call.threads, take);
    }
};

// `n` is a multiple of the widest vector.
inline void scaled_norm(const float* x, const edgellm::Norm& norm, int n, float epsilon, float* out) {
    if (!norm.bias) {
        const Vec scale = splat(inverse_rms(x, n, epsilon));
        for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) * scale * load(norm.weight + i));
        return;
    }
    Vec sum = {};
    for (int i = 0; i < n; i += LANES) sum += load(x + i);
    const Vec mean = splat(sum_of(sum) / static_cast<float>(n));
    for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) - mean);
    const Vec scale = splat(inverse_rms(out, n, epsilon));
    for (int i = 0; i < n; i += LANES)
        store(out + i, load(out + i) * scale * load(norm.weight + i) + load(norm.bias + i));
}

class Step {
public:
    Step(const edgellm::StepCall& call, const edgellm::Places& places, const Buffers& buffers)
        : call_(call), model_(*call.model), places_(places), b_(buffers), rows_(call.count), span_of_(rows_),
          caller_(std::this_thread::get_id()) {
        for (int s = 0; s < call.span_count; ++s)
            for (int r = places.spans[s].row; r < places.spans[s + 1].row; ++r) span_of_[r] = s;
    }

    static int phases(const edgellm::Transformer& model) { return 13 * model.layer_count + 5; }

    bool stopped() const { return stop_; }

    void run(edgellm::Worker& worker) {
        every_row(worker, [&](int r) { enter(r); });
        for (int l = call_.first_layer; l < call_.last_layer; ++l) {
            if (must_stop()) return;
            const edgellm::Layer& layer = model_.layers[l];
            const edgellm::Heads& heads = places_.kinds[places_.kind_of[l]];
            const edgellm::Rows attended = edgellm::Rows::in(b_.attended, rows_, heads.width());
            every_row(
                worker,
                [&](int r) {
                    if (l > call_.first_layer)
                        complete(r, model_.layers[l - 1].down_bias, model_.layers[l - 1].post_mlp_norm);
                    normalize(layer.attention_norm, r, layer.any_fine());
                },
                weights(layer.q));
            const int outputs = layer.qkv_outputs();
            multiply(worker, {{&layer.q, b_.qkv},
                            {&layer.k, b_.qkv + layer.q.outputs},
                            {&layer.v, b_.qkv + layer.q.outputs + layer.k.outputs}},
                     b_.x, outputs, false);
            every_row(worker, [&](int r) {
                float* qkv = b_.qkv + size_t(r) * outputs;
                add_biases(layer, qkv);
                append_token(kv_of(layer, span_of_[r]), call_.ropes[layer.rope], layer.head_norms,
                             layer.slot, heads.heads, position(r), qkv, b_.q + size_t(r) * heads.width());
            });
            attention(worker, layer, heads);
            every_row(
                worker, [&](int r) { join_splits(call_.pools[layer.pool], heads, attended, r); },
                weights(layer.o));
            add_product(worker, layer.o, attended, layer.post_attention_norm);
            if (layer.has_experts())
                run_experts(worker, layer);
            else
                run_mlp(worker, layer);
        }
        every_row(worker, [&](int r) { finish(r); }, weights(model_.head));
        if (call_.logit_rows == 0) return;
        multiply(worker, {{&model_.head, call_.logits}}, b_.x,
                 size_t(model_.head.count()) * edgellm::PANEL, false, call_.logit_rows);
        if (model_.logit_softcap > 0) cap_logits(worker);
    }

private:
    // A worker that has not noticed yet does the others' share of the layer and leaves at the next.
    bool must_stop() {
        const bool asks = call_.should_stop != nullptr && std::this_thread::get_id() == caller_;
        if (asks && !stop_ && call_.should_stop()) stop_ = true;
        return stop_;
    }

    // A layer's panels, so many an item. Many rows wait for arithmetic and not for weights.
    edgellm::Ahead weights(const edgellm::Linear& linear, int run) const {
        if (rows_ > few_rows_of(linear.kind)) return {};
        return {linear.panels, run * linear.panel_bytes(), size_t(linear.count() / run)};
    }
    edgellm::Ahead weights(const edgellm::Linear& linear) const {
        return weights(linear, panels_at_once(linear, rows_, call_.threads));
    }
    int groups_at_once(const edgellm::Layer& layer) const {
        return std::max(1, panels_at_once(layer.up, rows_, call_.threads) / 2);
    }

    // Many rows are taken some at a time: the numbers of 16 that are quantized fill whole cache lines.
    template <typename Row>
    void every_row(edgellm::Worker& worker, const Row& row, const edgellm::Ahead& ahead = {}) const {
        const int run = std::max(1, std::min(16, rows_ / (4 * call_.threads)));
        worker.each(
            (rows_ + run - 1) / run,
            [&](int item) {
                for (int r = item * run; r < std::min(rows_, (item + 1) * run); ++r) row(r);
            },
            ahead);
    }

    struct Product {
        const edgellm::Linear* linear;
        float* y;  // of the first row
    };

    // Products of the same rows, one after the other.
    void multiply(edgellm::Worker& worker, std::initializer_list<Product> products, const edgellm::Rows& x,
                  size_t step, bool add, int rows = 0) const {
        if (rows == 0) rows = rows_;
        const auto run_of = [&](const Product& p) { return panels_at_once(*p.linear, rows, call_.threads); };
        const auto items = [&](const Product& p) { return (p.linear->count() + run_of(p) - 1) / run_of(p); };
        int count = 0;
        for (const Product& p : products) count += items(p);
        worker.each(count, [&](int item) {
            const Product* p = products.begin();
            for (; item >= items(*p); ++p) item -= items(*p);
            const int run = run_of(*p), first = item * run;
            multiply_panels(*p->linear, first, std::min(p->linear->count(), first + run), x, rows,
                            p->y + size_t(first) * edgellm::PANEL, step, add);
        });
    }

    // What the residual adds, now or, where a norm comes before that, in `complete`.
    void add_product(edgellm::Worker& worker, const edgellm::Linear& linear, const edgellm::Rows& x,
                     const edgellm::Norm& post) const {
        if (post.weight)
            multiply(worker, {{&linear, b_.branch}}, x, model_.hidden, false);
        else
            multiply(worker, {{&linear, b_.residual}}, x, model_.hidden, true);
    }

    void complete(int r, const float* bias, const edgellm::Norm& post) const {
        float* residual = b_.residual + size_t(r) * model_.hidden;
        if (!post.weight) {
            if (bias) add_to(residual, bias, model_.hidden);
            return;
        }
        float* branch = b_.branch + size_t(r) * model_.hidden;
        if (bias) add_to(branch, bias, model_.hidden);
        float* normed = static_cast<float*>(edgellm::scratch(4 * size_t(model_.hidden)));
        scaled_norm(branch, post, model_.hidden, model_.epsilon, normed);
        add_to(residual, normed, model_.hidden);
    }

    void add_biases(const edgellm::Layer& layer, float* qkv) const {
        const auto add = [&](const float* bias, int outputs) {
            for (int i = 0; bias && i < outputs; ++i) qkv[i] += bias[i];
            qkv += outputs;
        };
        add(layer.q_bias, layer.q.outputs);
        add(layer.k_bias, layer.k.outputs);
        add(layer.v_bias, layer.v.outputs);
    }

    // What the layers before have left or, before the first, a token's row of the table: one lane of its panel.
    void enter(int r) const {
        const int64_t token = call_.tokens[r];
        float* x = b_.residual + size_t(r) * model_.hidden;
        if (call_.first_layer > 0) {
            std::memcpy(x, call_.entering + size_t(r) * model_.hidden, 4 * size_t(model_.hidden));
            return;
        }
        read_row(model_.embedding, static_cast<int>(token), x);
        if (model_.embedding_scale == 1) return;
        for (int i = 0; i < model_.hidden; i += LANES)
            store(x + i, load(x + i) * splat(model_.embedding_scale));
    }

    void normalize(const edgellm::Norm& norm, int r, bool fine) const {
        const float* x = b_.residual + size_t(r) * model_.hidden;
        if (norm.weight) {
            float* normed = static_cast<float*>(edgellm::scratch(4 * size_t(model_.hidden)));
            scaled_norm(x, norm, model_.hidden, model_.epsilon, normed);
            x = normed;
        }
        quantize_groups(x, 0, model_.hidden / edgellm::GROUP, b_.x, r, fine);
    }

    void cap_logits(edgellm::Worker& worker) const {
        constexpr int RUN = 64;  // panels
        const int panels = model_.head.count(), runs = (panels + RUN - 1) / RUN;
        worker.each(runs * call_.logit_rows, [&](int item) {
            const int first = item % runs * RUN, end = std::min(panels, first + RUN);
            float* row = call_.logits + size_t(item / runs) * panels * edgellm::PANEL;
            soft_cap(row + size_t(first) * edgellm::PANEL, (end - first) * edgellm::PANEL,
                     model_.logit_softcap);
        });
    }

    void finish(int r) const {
        const edgellm::Layer& last = model_.layers[call_.last_layer - 1];
        complete(r, last.down_bias, last.post_mlp_norm);
        const float* x = b_.residual + size_t(r) * model_.hidden;
        float* out = call_.states + size_t(r) * model_.hidden;
        if (call_.last_layer < model_.layer_count) {
            std::memcpy(out, x, 4 * size_t(model_.hidden));
            return;
        }
        scaled_norm(x, model_.final_norm, model_.hidden, model_.epsilon, out);
        // a place that no later row has: nobody reads x any more
        const edgellm::Place& next = places_.spans[span_of_[r] + 1];
        const int logit = next.logit - (next.row - r);
        if (logit >= places_.spans[span_of_[r]].logit)
            quantize_groups(out, 0, model_.hidden / edgellm::GROUP, b_.x, logit, true);
    }

    // The cache as a span sees it.
    edgellm::KV kv_of(const edgellm::Layer& layer, int span) const {
        edgellm::KV kv = call_.pools[layer.pool];
        kv.table = call_.spans[span].tables[layer.pool];
        return kv;
    }

    int position(int r) const {
        const int span = span_of_[r];
        return call_.spans[span].start + r - places_.spans[span].row;
    }

    // What row `row` of a KV head of a span comes to over a split of the keys.
    float* part(const edgellm::Heads& heads, int span, int split, int kv_head, int row) const {
        const size_t head = size_t(split) * heads.kv_heads + kv_head;
        const size_t at = heads.spans[span].part + head * call_.spans[span].rows * heads.group + row;
        return b_.parts + at * (heads.head_dim + 2);
    }

    // A task of attention: rows of a KV head of a span, over one split of the keys or, where there is one
    // task for all of them, over those from 0 on.
    struct Attention {
        int span, split, run, kv_head;
    };

    Attention attention_of(const edgellm::Heads& heads, int item) const {
        int span = call_.span_count - 1;
        while (heads.spans[span].first > item) --span;
        const edgellm::Tasks& tasks = heads.spans[span];
        item -= tasks.first;
        return {span, item % tasks.splits, item / tasks.splits % tasks.runs, item / tasks.splits / tasks.runs};
    }

    void attention(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        const int items = heads.tasks(), group = heads.group;
        worker.each(items, [&](int item) {
            const Attention at = attention_of(heads, item);
            const edgellm::Span& span = call_.spans[at.span];
            const int first = at.run * edgellm::ROWS_PER_TASK, all = span.rows * group;
            const int rows = std::min(edgellm::ROWS_PER_TASK, all - first);
            const bool whole = heads.spans[at.span].splits == 1;
            const int from = whole ? 0 : at.split;
            const int to = whole ? edgellm::split_count(span.start + (first + rows - 1) / group + 1) : from + 1;
            // threads that are equally fast take turns
            const Attention next = attention_of(heads, std::min(item + call_.threads, items - 1));
            const size_t next_row = kv_of(layer, next.span)
                                        .first_row(next.split * edgellm::SPLIT, layer.slot, next.kv_head);
            const edgellm::Queries queries{b_.q + size_t(places_.spans[at.span].row) * heads.width(),
                                           heads.heads,
                                           span.rows,
                                           span.start,
                                           layer.window,
                                           layer.scale,
                                           layer.softcap};
            attend_rows(kv_of(layer, at.span), queries,
                        {layer.slot, at.kv_head, first, rows, from, to,
                         part(heads, at.span, at.split, at.kv_head, first), next_row});
        });
    }

    void join_splits(const edgellm::KV& kv, const edgellm::Heads& heads, const edgellm::Rows& attended,
                     int r) const {
        float* out = static_cast<float*>(edgellm::scratch(4 * size_t(heads.width())));
        const int span = span_of_[r], group = heads.group;
        for (int head = 0; head < heads.heads; ++head) {
            const int kv_head = head / group, row = (r - places_.spans[span].row) * group + head % group;
            float* sum = part(heads, span, 0, kv_head, row);
            for (int s = 1; s < heads.spans[span].splits; ++s)
                join(sum, part(heads, span, s, kv_head, row), heads.head_dim);
            finish_row(kv, sum, out + head * heads.head_dim);
        }
        quantize_groups(out, 0, heads.width() / edgellm::GROUP, attended, r, false);
    }

    void activate(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Rows& out) const {
        const int groups = layer.up.outputs / edgellm::GROUP, run = groups_at_once(layer);
        worker.each((groups + run - 1) / run, [&](int item) {
            const int first = item * run, end = std::min(groups, first + run);
            activate_groups(layer, layer.gate, layer.up, first, end, b_.x, rows_, out);
        });
    }

    void run_mlp(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        const edgellm::Rows activated = edgellm::Rows::in(b_.activated, rows_, layer.up.outputs);
        every_row(
            worker,
            [&](int r) {
                complete(r, layer.o_bias, layer.post_attention_norm);
                normalize(layer.mlp_norm, r, false);
            },
            weights(layer.gated() ? layer.gate : layer.up, 2 * groups_at_once(layer)));
        activate(worker, layer, activated);
        add_product(worker, layer.down, activated, layer.post_mlp_norm);
    }

    void run_experts(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        const size_t hidden = model_.hidden;
        every_row(worker, [&](int r) {
            complete(r, layer.o_bias, layer.post_attention_norm);
            const float* x = b_.residual + r * hidden;
            if (layer.mlp_norm.weight)
                scaled_norm(x, layer.mlp_norm, model_.hidden, model_.epsilon, b_.experts.normed(r));
            else
                std::memcpy(b_.experts.normed(r), x, 4 * hidden);
        });
        b_.experts.run(worker, layer);
        const bool behind = layer.post_mlp_norm.weight != nullptr;
        every_row(worker, [&](int r) {
            b_.experts.sum(layer.router, r, (behind ? b_.branch : b_.residual) + r * hidden, !behind);
        });
    }

    const edgellm::StepCall& call_;
    const edgellm::Transformer& model_;
    const edgellm::Places& places_;
    const Buffers& b_;
    const int rows_;
    std::vector<int> span_of_;  // of each row
    const std::thread::id caller_;
    std::atomic<bool> stop_{false};
};

// Gives 0 if it was stopped.
inline int32_t step(const edgellm::StepCall& call) {
    size_t bytes = 0;
    const size_t before = reinterpret_cast<uintptr_t>(call.workspace) % 64;
    const edgellm::Places places = edgellm::places_of(call);
    const Buffers buffers(call, places, call.workspace + (64 - before), bytes);
    Step job(call, places, buffers);
    edgellm::run_team(call.threads, Step::phases(*call.model), [&](edgellm::Worker& worker) { job.run(worker); });
    return !job.stopped();
}

inline size_t workspace(const edgellm::StepCall& call) {
    size_t bytes = 0;
    Buffers(call, edgellm::places_of(call), nullptr, bytes);
    return bytes + 64;
}

inline Experts experts_of(const edgellm::ExpertsCall& call, char* memory, size_t& bytes) {
    return Experts(*call.model, call.count, call.threads, [&](size_t size) {
        char* taken = memory + bytes;
        bytes += Buffers::aligned(size);
        return taken;
    });
}

// What the router's experts give of a layer that has some.
inline void experts(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    const size_t before = reinterpret_cast<uintptr_t>(call.workspace) % 64, hidden = call.model->hidden;
    const Experts experts = experts_of(call, call.workspace + (64 - before), bytes);
    const edgellm::Layer& layer = call.model->layers[call.layer];
    constexpr int PHASES = 7;
    edgellm::run_team(call.threads, PHASES, [&](edgellm::Worker& worker) {
        worker.each(call.count, [&](int r) { std::memcpy(experts.normed(r), call.x + r * hidden, 4 * hidden); });
        experts.run(worker, layer);
        worker.each(call.count, [&](int r) { experts.sum(layer.router, r, call.y + r * hidden, false); });
    });
}

inline size_t experts_workspace(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    experts_of(call, nullptr, bytes);
    return bytes + 64;
}
