// Rows of a step: how they enter the layers and leave them, and the products and norms between.

class StepRows {
protected:
    StepRows(const edgellm::StepCall& call, const edgellm::Places& places, const Buffers& buffers)
        : call_(call), model_(*call.model), places_(places), b_(buffers), rows_(call.count), span_of_(rows_) {
        for (int s = 0; s < call.span_count; ++s)
            for (int r = places.spans[s].row; r < places.spans[s + 1].row; ++r) span_of_[r] = s;
    }

    bool has_streams() const { return model_.streams > 1; }
    bool ends() const { return call_.last_layer == model_.layer_count; }

    StreamRow streams(int r) const {
        const size_t hidden = model_.hidden;
        return {b_.first_stream + r * hidden, b_.other_streams + r * (model_.streams - 1) * hidden, model_.streams,
                model_.hidden};
    }

    // A layer's panels, so many an item. Many rows wait for arithmetic and not for weights.
    edgellm::Ahead weights(const edgellm::Linear& linear, int run) const {
        if (rows_ > few_rows_of(linear.kind)) return {};
        return {linear.panels, run * linear.panel_bytes(), size_t(linear.count() / run)};
    }
    edgellm::Ahead weights(const edgellm::Linear& linear) const {
        return weights(linear, panels_at_once(linear, rows_, call_.threads));
    }

    // What an output projection reads.
    edgellm::Rows mixer_out(const edgellm::Linear& o) const { return edgellm::Rows::in(b_.attended, rows_, o.inputs); }
    edgellm::Rows mixer_out(const edgellm::Layer& layer) const { return mixer_out(layer.o); }

    // Many rows are taken some at a time, an even number: two share lines of the cache, see RowGroup. `readers`: what
    // will read the rows that it keeps for adapters.
    template <typename Row>
    void every_row(edgellm::Worker& worker, const Row& row, const edgellm::Ahead& ahead = {},
                   const Readers& readers = {}) const {
        int run = std::max(1, std::min(16, rows_ / (4 * call_.threads)));
        if (rows_ >= 2 * call_.threads) run = (run + 1) / 2 * 2;
        worker.each(
            (rows_ + run - 1) / run,
            [&](int item) {
                const int first = item * run, end = std::min(rows_, first + run);
                for (int r = first; r < end; ++r) row(r);
                b_.adapters.shrink(first, end, readers);
            },
            ahead);
    }

    struct Product {
        const edgellm::Linear* linear;
        float* y;  // of the first row
        Changed changed = {};
        const edgellm::Rows* x = nullptr;  // in place of those of the others
    };

    // Products of the same rows, one after the other.
    void multiply(edgellm::Worker& worker, std::initializer_list<Product> products, const edgellm::Rows& x,
                  size_t step, bool add, int rows = 0) const {
        if (rows == 0) rows = rows_;
        const auto run_of = [&](const Product& p) { return panels_at_once(*p.linear, rows, call_.threads); };
        const auto items = [&](const Product& p) {
            return p.linear->panels == nullptr ? 0 : (p.linear->count() + run_of(p) - 1) / run_of(p);
        };
        int count = 0;
        for (const Product& p : products) count += items(p);
        worker.each(count, [&](int item) {
            const Product* p = products.begin();
            for (; item >= items(*p); ++p) item -= items(*p);
            const int run = run_of(*p), first = item * run;
            const int end = std::min(p->linear->count(), first + run);
            float* y = p->y + size_t(first) * edgellm::PANEL;
            multiply_changed(*p->linear, p->changed, b_.adapters, first, end, p->x ? *p->x : x, rows, y, step, add);
        });
    }

    // Products of each head's rows with its own part of a matrix; heads lie `width` apart in a row of y.
    void multiply_heads(edgellm::Worker& worker, const edgellm::Linear& all, int heads, const HeadRows& x, float* y,
                        int width, const Changed& changed = {}) const {
        const int panels = all.count() / heads;
        const int run = panels_at_once(edgellm::expert_of(all, heads, 0), rows_, call_.threads);
        const int runs = (panels + run - 1) / run;
        worker.each(heads * runs, [&](int item) {
            const int head = item / runs, first = item % runs * run, end = std::min(panels, first + run);
            multiply_changed(edgellm::expert_of(all, heads, head), changed, b_.adapters, first, end, x.of(head), rows_,
                             y + size_t(head) * width + size_t(first) * edgellm::PANEL, size_t(heads) * width, false,
                             head);
        });
    }

    // What the residual adds, now or, where a norm comes before that, in `complete`.
    void add_product(edgellm::Worker& worker, const edgellm::Linear& linear, const Changed& changed,
                     const edgellm::Rows& x, const edgellm::Norm& post) const {
        if (post.weight)
            multiply(worker, {{&linear, b_.branch, changed}}, x, model_.hidden, false);
        else
            multiply(worker, {{&linear, b_.residual, changed}}, x, model_.hidden, true);
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

    // Experts have added their biases, each by its share.
    void complete_mlp(int r, const edgellm::Layer& layer) const {
        complete(r, layer.has_experts() ? nullptr : layer.down_bias, layer.post_mlp_norm);
        if (has_streams()) correct(layer.altup, streams(r), model_.epsilon, b_.residual + size_t(r) * model_.hidden);
    }

    // What a layer still has to add when its last product is there, and the scale of all of it.
    void leave(int r, const edgellm::Layer& layer) const {
        if (!layer.has_input())
            complete_mlp(r, layer);
        else if (has_streams())
            add_to_others(r, layer);
        else
            complete(r, nullptr, {layer.input.post_norm, nullptr});
        if (layer.output_scale == 1) return;
        float* x = b_.residual + size_t(r) * model_.hidden;
        for (int i = 0; i < model_.hidden; i += LANES) store(x + i, load(x + i) * splat(layer.output_scale));
    }

    // What the layer's own embeddings add to all streams but the first.
    void add_to_others(int r, const edgellm::Layer& layer) const {
        const size_t hidden = model_.hidden;
        float* normed = static_cast<float*>(edgellm::scratch(4 * hidden));
        scaled_norm(b_.branch + r * hidden, {layer.input.post_norm, nullptr}, model_.hidden, model_.epsilon, normed);
        for (int s = 1; s < model_.streams; ++s) add_to(streams(r).of(s), normed, hidden);
    }

    // What the layers before have left or, before the first, a token's row of the table: one lane of its panel.
    void enter(int r) const {
        const int64_t token = call_.tokens[r];
        float* x = b_.residual + size_t(r) * model_.hidden;
        if (!call_.entering || b_.first.codes) embed(static_cast<int>(token), x);
        if (b_.first.codes) quantize_groups(x, 0, model_.hidden / edgellm::GROUP, b_.first, r, false);
        const size_t bytes = 4 * size_t(model_.hidden);
        const float* entering = call_.entering ? call_.entering + size_t(r) * model_.width() : x;
        if (has_streams()) {
            std::memcpy(streams(r).first, entering, bytes);
            if (call_.entering) std::memcpy(streams(r).others, entering + model_.hidden, (model_.streams - 1) * bytes);
        } else if (call_.entering) {
            std::memcpy(x, entering, bytes);
        }
    }

    void embed(int token, float* x) const {
        read_row(model_.embedding, token, x);
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
        b_.adapters.keep(r, x, 0, model_.hidden);
        quantize_groups(x, 0, model_.hidden / edgellm::GROUP, b_.x, r, fine);
    }

    void finish(int r) const {
        if (!has_streams() || !ends()) leave(r, model_.layers[call_.last_layer - 1]);
        const float* x = b_.residual + size_t(r) * model_.hidden;
        float* out = call_.states + size_t(r) * (ends() ? model_.hidden : model_.width());
        if (!ends()) {
            const StreamRow row = streams(r);
            std::memcpy(out, has_streams() ? row.first : x, 4 * size_t(model_.hidden));
            if (has_streams()) std::memcpy(out + model_.hidden, row.others, 4 * size_t(row.count - 1) * row.width);
            return;
        }
        scaled_norm(x, model_.final_norm, model_.hidden, model_.epsilon, out);
        // a place that no later row has: nobody reads x any more
        const edgellm::Place& next = places_.spans[span_of_[r] + 1];
        const int logit = next.logit - (next.row - r);
        if (logit >= places_.spans[span_of_[r]].logit)
            quantize_groups(out, 0, model_.hidden / edgellm::GROUP, b_.x, logit, true);
    }

    const edgellm::StepCall& call_;
    const edgellm::Transformer& model_;
    const edgellm::Places& places_;
    const Buffers& b_;
    const int rows_;
    std::vector<int> span_of_;  // of each row
};
