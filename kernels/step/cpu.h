// All layers of a few tokens in one call; included once for each instruction set.

// One row of activation(gate) * (norm(context / sqrt(hidden)) + sqrt(width) * table[row]) / sqrt(2), quantized. The
// norm's epsilon takes the division.
inline void activate_input(const edgellm::Transformer& model, const edgellm::Layer& layer, int table_row,
                           const float* gate, const float* context, const edgellm::Rows& out, int r) {
    const int width = model.layer_table.inputs;
    float* e = static_cast<float*>(edgellm::scratch(4 * size_t(width)));
    read_row(model.layer_table, table_row, e);
    const Vec inverse = splat(inverse_rms(context, width, model.epsilon * static_cast<float>(model.hidden)));
    const Vec scale = splat(std::sqrt(static_cast<float>(width))), half = splat(0.70710678f);
    for (int i = 0; i < width; i += LANES) {
        const Vec both = load(context + i) * inverse * load(model.layer_norm + i) + load(e + i) * scale;
        store(e + i, activated(load(gate + i), layer.activation) * (both * half));
    }
    quantize_groups(e, 0, width / edgellm::GROUP, out, r, false);
}

class Step : StepMixers {
public:
    Step(const edgellm::StepCall& call, const edgellm::Places& places, const Buffers& buffers)
        : StepMixers(call, places, buffers), caller_(std::this_thread::get_id()) {}

    int phases() const { return (24 + b_.adapters.phases()) * model_.layer_count + 9; }

    bool stopped() const { return stop_; }

    void run(edgellm::Worker& worker) {
        every_row(worker, [&](int r) { enter(r); });
        if (has_streams() && !call_.entering) enter_streams(worker);
        for (int l = call_.first_layer; l < call_.last_layer; ++l) {
            if (must_stop()) return;
            const edgellm::Layer& layer = model_.layers[l];
            if (layer.mixer == edgellm::SHORT_CONV)
                run_short_conv(worker, layer, l);
            else if (layer.mixer == edgellm::MAMBA2)
                run_mamba2(worker, layer, l);
            else if (layer.mixer == edgellm::DELTA_NET)
                run_delta_net(worker, layer, l);
            else {
                if (layer.has_beside()) add_beside(worker, layer, l);
                run_attention(worker, layer, l);
            }
            multiply_out(worker, layer);
            if (layer.has_experts())
                run_experts(worker, layer, l);
            else
                run_mlp(worker, layer);
            if (layer.has_input()) add_input(worker, layer, l);
        }
        if (has_streams() && ends()) leave_streams(worker);
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

    // The other streams of a token's embedding, which is the first one.
    void enter_streams(edgellm::Worker& worker) const {
        const edgellm::Linear& enter = model_.streams_enter;
        multiply(worker, {{&enter, b_.other_streams}}, b_.first, enter.outputs, false);
        every_row(worker, [&](int r) { level(streams(r)); });
    }

    // All streams become one again, in the residual.
    void leave_streams(edgellm::Worker& worker) const {
        const int others = model_.streams - 1, hidden = model_.hidden;
        const HeadRows rows(b_.attended, rows_, hidden);
        every_row(worker, [&](int r) {
            leave(r, model_.layers[call_.last_layer - 1]);
            for (int s = 0; s < others; ++s) rows.quantize(streams(r).of(s + 1), s, r);
        });
        multiply_heads(worker, model_.streams_leave, others, rows, b_.other_streams, hidden);
        every_row(worker, [&](int r) {
            level(streams(r));
            merge(streams(r), b_.residual + size_t(r) * hidden);
        });
    }

    int groups_at_once(const edgellm::Layer& layer) const {
        return std::max(1, panels_at_once(layer.up, rows_, call_.threads) / 2);
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

    void activate(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Rows& out) const {
        const int groups = layer.up.outputs / edgellm::GROUP, run = groups_at_once(layer);
        const Readers in = mlp_readers(layer);
        Mlp mlp{layer.gate, layer.up, layer.gate_bias, layer.up_bias, layer.activation,
                in.of(&edgellm::LayerChanges::gate), in.of(&edgellm::LayerChanges::up)};
        if (layer.cuts_off()) {
            const int outputs = layer.up.outputs;
            multiply(worker, {{&layer.gate, b_.gates, mlp.changed_gate}}, b_.x, outputs, false);
            every_row(worker, [&](int r) {
                b_.cutoffs[r] = cutoff_of(b_.gates + r * size_t(outputs), outputs, layer.cutoff);
            });
            mlp.gates = b_.gates;
            mlp.cutoffs = b_.cutoffs;
        }
        worker.each((groups + run - 1) / run, [&](int item) {
            const int first = item * run, end = std::min(groups, first + run);
            activate_groups(mlp, first, end, b_.x, rows_, out, b_.adapters);
        });
    }

    Readers mlp_readers(const edgellm::Layer& layer) const {
        return {&layer, model_.hidden, {&edgellm::LayerChanges::gate, &edgellm::LayerChanges::up}};
    }

    void run_mlp(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        const edgellm::Rows activated = edgellm::Rows::in(b_.activated, rows_, layer.up.outputs);
        every_row(
            worker,
            [&](int r) {
                complete_attention(r, layer);
                normalize(layer.mlp_norm, r, false);
            },
            weights(layer.gated() ? layer.gate : layer.up, 2 * groups_at_once(layer)), mlp_readers(layer));
        activate(worker, layer, activated);
        const Readers behind{&layer, layer.down.inputs, {&edgellm::LayerChanges::down}};
        b_.adapters.shrink(worker, behind);
        add_product(worker, layer.down, behind.of(&edgellm::LayerChanges::down), activated, layer.post_mlp_norm);
    }

    void run_experts(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const size_t hidden = model_.hidden;
        const auto enter_row = [&](int r) {
            complete(r, layer.o_bias, layer.post_attention_norm);
            const float* x = b_.residual + r * hidden;
            if (layer.shared.experts_norm) {
                b_.experts.read_beside(layer, model_.epsilon, x, r);
                return normalize(layer.mlp_norm, r, false);
            }
            if (layer.mlp_norm.weight)
                scaled_norm(x, layer.mlp_norm, model_.hidden, model_.epsilon, b_.experts.normed(r));
            else
                std::memcpy(b_.experts.normed(r), x, 4 * hidden);
            if (!layer.shared.up.panels) return;
            b_.adapters.keep(r, b_.experts.normed(r), 0, model_.hidden);
            quantize_groups(b_.experts.normed(r), 0, model_.hidden / edgellm::GROUP, b_.x, r, false);
        };
        every_row(worker, enter_row, {}, b_.experts.shared_readers(layer));
        b_.experts.run(worker, model_, l, b_.x, b_.adapters);
        const bool behind = layer.post_mlp_norm.weight != nullptr;
        every_row(worker, [&](int r) {
            float* out = (behind ? b_.branch : b_.residual) + r * hidden;
            if (layer.shared.post_norm) return b_.experts.sum_beside(layer, model_.epsilon, r, out);
            b_.experts.sum(layer, r, out, !behind);
        });
    }

    void add_input(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const edgellm::LayerInput& input = layer.input;
        const int width = input.gate.outputs;
        const edgellm::Rows activated = edgellm::Rows::in(b_.activated, rows_, width);
        every_row(
            worker,
            [&](int r) {
                complete_mlp(r, layer);
                normalize({}, r, false);
            },
            weights(input.gate));
        multiply(worker, {{&input.gate, b_.mixed}, {&input.context, b_.mixed + width, {}, &b_.first}}, b_.x, 2 * width,
                 false);
        every_row(
            worker,
            [&](int r) {
                const float* gate = b_.mixed + size_t(r) * 2 * width;
                const int at = static_cast<int>(call_.tokens[r]) * model_.layer_count + l;
                const int row = at < model_.layer_table.outputs ? at : l;
                activate_input(model_, layer, row, gate, gate + width, activated, r);
            },
            weights(input.output));
        add_product(worker, input.output, {}, activated, {input.post_norm, nullptr});
    }

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
    edgellm::run_team(call.threads, job.phases(), [&](edgellm::Worker& worker) { job.run(worker); });
    buffers.experts.leave(*call.model);
    return !job.stopped();
}

inline size_t step_workspace(const edgellm::StepCall& call) {
    size_t bytes = 0;
    Buffers(call, edgellm::places_of(call), nullptr, bytes);
    return bytes + 64;
}

// The experts of a call by itself, and the rows that a shared one reads.
struct ExpertsAlone {
    Experts experts;
    edgellm::Rows x{};

    ExpertsAlone(const edgellm::ExpertsCall& call, char* memory, size_t& bytes) {
        const auto take = [&](size_t size) {
            char* taken = memory + bytes;
            bytes += Buffers::aligned(size);
            return taken;
        };
        experts = Experts(*call.model, call.count, call.threads, take);
        const int hidden = call.model->hidden;
        x = edgellm::Rows::in(take(edgellm::Rows::bytes(call.count, hidden)), call.count, hidden);
    }
};

// What the experts of a layer that has some give; of an MLP beside them, which reads the residual, the sum of both.
inline void experts(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    const size_t before = reinterpret_cast<uintptr_t>(call.workspace) % 64, hidden = call.model->hidden;
    const ExpertsAlone alone(call, call.workspace + (64 - before), bytes);
    const Experts& experts = alone.experts;
    const edgellm::Layer& layer = call.model->layers[call.layer];
    const float epsilon = call.model->epsilon;
    constexpr int PHASES = 7;
    edgellm::run_team(call.threads, PHASES, [&](edgellm::Worker& worker) {
        worker.each(call.count, [&](int r) {
            const float* x = call.x + r * hidden;
            if (layer.shared.experts_norm) {
                float* normed = static_cast<float*>(edgellm::scratch(4 * hidden));
                experts.read_beside(layer, epsilon, x, r);
                scaled_norm(x, layer.mlp_norm, call.model->hidden, epsilon, normed);
                return quantize_groups(normed, 0, call.model->hidden / edgellm::GROUP, alone.x, r, false);
            }
            std::memcpy(experts.normed(r), x, 4 * hidden);
            if (layer.shared.up.panels)
                quantize_groups(x, 0, call.model->hidden / edgellm::GROUP, alone.x, r, false);
        });
        experts.run(worker, *call.model, call.layer, alone.x);
        worker.each(call.count, [&](int r) {
            if (layer.shared.post_norm) return experts.sum_beside(layer, epsilon, r, call.y + r * hidden);
            experts.sum(layer, r, call.y + r * hidden, false);
        });
    });
    experts.leave(*call.model);
}

inline size_t experts_workspace(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    const ExpertsAlone alone(call, nullptr, bytes);
    return bytes + 64;
}
