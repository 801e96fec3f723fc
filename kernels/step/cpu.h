// All layers of a few tokens in one call; included once for each instruction set.

// Buffers of a step, cut out of the caller's workspace. Each begins with a cache line, so that threads
// do not write to each other's.
struct Buffers {
    int32_t* chosen;  // [rows, KV heads, blocks], numbers of those that a row reads
    float *residual, *branch, *mixed, *parts;  // branch: what a norm takes before it is added
    float *q, *delta;  // rotated queries, or rows behind a convolution; between the phases of a delta net
    float *first_stream, *other_streams, *laurel;  // [rows, hidden], [rows, (streams - 1) * hidden], [rows, hidden]
    float *gates, *cutoffs;                        // of an MLP whose gates count above a cutoff
    edgellm::Rows x, first{};  // first: what enters layer 0, for layers that have embeddings of their own
    char *attended, *activated;  // rows of each layer's width
    Experts experts;
    Adapters adapters;

    static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

    Buffers(const edgellm::StepCall& call, const edgellm::Places& places, char* memory, size_t& bytes) {
        const edgellm::Transformer& m = *call.model;
        const int rows = call.count;
        int mixed_outputs = 0, width = 0, wide = 0, intermediate = 0, cut = 0;
        size_t delta_floats = 0, of_heads = 0;
        bool behind = false, laurels = false;
        bool inputs = m.streams > 1;
        for (int l = 0; l < m.layer_count; ++l) {
            const edgellm::Layer& layer = m.layers[l];
            mixed_outputs = std::max({mixed_outputs, layer.mixed_outputs(), layer.mamba2.inputs()});
            width = std::max({width, layer.o.inputs, layer.beside_o.inputs});
            wide = std::max({wide, layer.o.inputs, layer.mamba2.mixed()});
            if (layer.latent.there()) {
                const int most = std::max(layer.latent.key(), layer.latent.rank());
                of_heads = std::max(of_heads, HeadRows::bytes(layer.heads, rows, most));
                width = std::max(width, layer.latent.query_down.outputs);
                wide = std::max(wide, layer.heads * (layer.k.outputs + layer.latent.rank()));
                mixed_outputs = std::max(mixed_outputs, layer.o.inputs);
            }
            if (layer.mixer == edgellm::DELTA_NET)
                delta_floats = std::max(delta_floats, edgellm::DeltaNetBuffers::floats(layer.delta_net, rows));
            if (!layer.has_experts()) intermediate = std::max(intermediate, layer.up.outputs);
            behind = behind || layer.post_attention_norm.weight || layer.post_mlp_norm.weight || layer.has_input();
            inputs = inputs || layer.has_input();
            mixed_outputs = std::max(mixed_outputs, 2 * layer.input.gate.outputs);
            intermediate = std::max({intermediate, layer.input.gate.outputs, layer.laurel.left.outputs});
            laurels = laurels || layer.has_laurel();
            if (layer.cuts_off()) cut = std::max(cut, layer.up.outputs);
        }
        if (m.streams > 1) of_heads = std::max(of_heads, HeadRows::bytes(m.streams - 1, rows, m.hidden));
        size_t sums = 0, choices = 0;
        for (const edgellm::Heads& heads : places.kinds) {
            sums = std::max(sums, heads.floats());
            choices = std::max(choices, size_t(rows) * heads.kv_heads * places.chosen);
        }
        const auto take = [&](size_t size) {
            char* taken = memory + bytes;
            bytes += aligned(size);
            return taken;
        };
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        residual = floats(size_t(rows) * m.hidden);
        branch = behind ? floats(size_t(rows) * m.hidden) : nullptr;
        mixed = floats(size_t(rows) * mixed_outputs);
        q = floats(size_t(rows) * wide);
        parts = floats(sums);
        chosen = reinterpret_cast<int32_t*>(take(4 * choices));
        delta = floats(delta_floats);
        first_stream = floats(m.streams > 1 ? size_t(rows) * m.hidden : 0);
        other_streams = floats(size_t(rows) * (m.streams - 1) * m.hidden);
        laurel = floats(laurels ? size_t(rows) * m.hidden : 0);
        gates = floats(size_t(rows) * cut);
        cutoffs = floats(cut ? rows : 0);
        x = edgellm::Rows::in(take(edgellm::Rows::bytes(rows, m.hidden)), rows, m.hidden);
        if (inputs) first = edgellm::Rows::in(take(edgellm::Rows::bytes(rows, m.hidden)), rows, m.hidden);
        attended = take(std::max(edgellm::Rows::bytes(rows, width), of_heads));
        activated = take(edgellm::Rows::bytes(rows, intermediate));
        experts = Experts(m, rows, call.threads, take);
        adapters = Adapters(call, take);
    }
};

class Step {
public:
    Step(const edgellm::StepCall& call, const edgellm::Places& places, const Buffers& buffers)
        : call_(call), model_(*call.model), places_(places), b_(buffers), rows_(call.count), span_of_(rows_),
          caller_(std::this_thread::get_id()) {
        for (int s = 0; s < call.span_count; ++s)
            for (int r = places.spans[s].row; r < places.spans[s + 1].row; ++r) span_of_[r] = s;
    }

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

    bool has_streams() const { return model_.streams > 1; }
    bool ends() const { return call_.last_layer == model_.layer_count; }

    StreamRow streams(int r) const {
        const size_t hidden = model_.hidden;
        return {b_.first_stream + r * hidden, b_.other_streams + r * (model_.streams - 1) * hidden, model_.streams,
                model_.hidden};
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

    // What an output projection reads.
    edgellm::Rows mixer_out(const edgellm::Linear& o) const { return edgellm::Rows::in(b_.attended, rows_, o.inputs); }
    edgellm::Rows mixer_out(const edgellm::Layer& layer) const { return mixer_out(layer.o); }

    // What reads the rows before a layer's mixer, and behind it.
    Readers readers_before(const edgellm::Layer& layer) const {
        using C = edgellm::LayerChanges;
        if (layer.mixer == edgellm::SHORT_CONV) return {&layer, model_.hidden, {&C::conv_in}};
        if (layer.mixer == edgellm::MAMBA2) return {&layer, model_.hidden, {&C::mamba_in}};
        if (layer.mixer == edgellm::DELTA_NET)
            return {&layer, model_.hidden, {&C::delta_qkv, &C::delta_z, &C::delta_a, &C::delta_b}};
        if (layer.latent.query_down.panels) return {&layer, model_.hidden, {&C::query_down, &C::k, &C::v}};
        return {&layer, model_.hidden, {&C::q, &C::k, &C::v, &C::q_gate, &C::mamba_in}};
    }
    static Readers readers_behind(const edgellm::Layer& layer) {
        return {&layer, layer.o.inputs, {&edgellm::LayerChanges::o}};
    }
    // The place is that of mamba_in: what attention will read of the row before has the others.
    static Readers readers_behind_mamba(const edgellm::Layer& layer) {
        if (!layer.has_beside()) return readers_behind(layer);
        return {&layer, layer.beside_o.inputs, {&edgellm::LayerChanges::mamba_o}, 4};
    }

    // The rows that a layer's input projections read; `first`: the projection that comes next.
    void enter_layer(edgellm::Worker& worker, int l, const edgellm::Linear& first) const {
        const edgellm::Layer& layer = model_.layers[l];
        every_row(
            worker,
            [&](int r) {
                if (l > call_.first_layer) leave(r, model_.layers[l - 1]);
                if (has_streams())
                    predict(layer.altup, streams(r), model_.epsilon, b_.residual + size_t(r) * model_.hidden);
                normalize(layer.attention_norm, r, layer.any_fine());
            },
            weights(first), readers_before(layer));
    }

    edgellm::Mixing mixing(const edgellm::Layer& layer) const {
        const bool beside = layer.has_beside();
        return {call_, places_, beside ? layer.beside_pool : layer.pool,
                size_t(beside ? layer.beside_slot : layer.slot) * layer.state_size, b_.mixed,
                size_t(beside ? layer.mamba2.inputs() : layer.mixed_outputs()), mixer_out(layer.state_out())};
    }

    void run_short_conv(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const edgellm::ShortConv& conv = layer.short_conv;
        enter_layer(worker, l, conv.in);
        const Changed in = readers_before(layer).of(&edgellm::LayerChanges::conv_in);
        multiply(worker, {{&conv.in, b_.mixed, in}}, b_.x, conv.in.outputs, false);
        const edgellm::Mixing here = mixing(layer);
        short_conv(worker, conv, here, [&](const float* y, int first, int end, int r) {
            b_.adapters.keep(r, y, first * edgellm::GROUP, (end - first) * edgellm::GROUP);
            quantize_groups(y, first, end, here.out, r, false);
        });
        b_.adapters.shrink(worker, readers_behind(layer));
    }

    void run_mamba2(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const edgellm::Mixing mixing_here = mixing(layer);
        const Mamba2 op(layer.mamba2, mixing_here, b_.q);
        enter_layer(worker, l, layer.mamba2.in);
        const Changed in = readers_before(layer).of(&edgellm::LayerChanges::mamba_in);
        multiply(worker, {{&layer.mamba2.in, b_.mixed, in}}, b_.x, layer.mamba2.inputs(), false);
        op.mix(worker);
        op.scan(worker);
        every_row(
            worker,
            [&](int r) {
                float* out = static_cast<float*>(edgellm::scratch(4 * size_t(layer.mamba2.inner())));
                op.finish(r, out);
                b_.adapters.keep(r, out, 0, layer.mamba2.inner());
                quantize_groups(out, 0, layer.mamba2.inner() / edgellm::GROUP, mixing_here.out, r, false);
            },
            weights(layer.state_out()), readers_behind_mamba(layer));
    }

    // What a mamba2 beside attention adds to the residual; the rows that it reads stay for attention.
    void add_beside(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        run_mamba2(worker, layer, l);
        const Changed o = readers_behind_mamba(layer).of(&edgellm::LayerChanges::mamba_o);
        multiply(worker, {{&layer.beside_o, b_.residual, o}}, mixer_out(layer.beside_o), model_.hidden, true);
    }

    void run_delta_net(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const edgellm::DeltaNet& net = layer.delta_net;
        const edgellm::Mixing here = mixing(layer);
        enter_layer(worker, l, net.qkv);
        using C = edgellm::LayerChanges;
        const Readers in = readers_before(layer);
        multiply(worker, {{&net.qkv, b_.mixed, in.of(&C::delta_qkv)},
                          {&net.z, b_.mixed + net.z_at(), in.of(&C::delta_z)},
                          {&net.a, b_.mixed + net.a_at(), in.of(&C::delta_a)},
                          {&net.b, b_.mixed + net.b_at(), in.of(&C::delta_b)}},
                 b_.x, net.outputs(), false);
        std::vector<edgellm::StateRows> spans;
        for (int s = 0; s < call_.span_count; ++s)
            spans.push_back({here.before(s), call_.spans[s].states[layer.pool].targets, call_.spans[s].rows});
        const DeltaNetRows rows(net, b_.mixed, b_.delta, std::move(spans), here.state, rows_, call_.threads);
        rows.run(worker);
        every_row(
            worker,
            [&](int r) {
                float* out = static_cast<float*>(edgellm::scratch(4 * size_t(net.values())));
                rows.finish(r, model_.epsilon, out);
                b_.adapters.keep(r, out, 0, net.values());
                quantize_groups(out, 0, net.values() / edgellm::GROUP, here.out, r, false);
            },
            weights(layer.o), readers_behind(layer));
    }

    void run_latent_attention(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        const edgellm::Heads& heads = places_.kinds[places_.kind_of[l]];
        const edgellm::Latent& latent = layer.latent;
        const int outputs = layer.mixed_outputs(), k_at = layer.q.outputs, v_at = k_at + layer.k.outputs;
        const int down_at = v_at + layer.v.outputs, rotated = heads.head_dim;
        const bool down = latent.query_down.panels != nullptr;
        using C = edgellm::LayerChanges;
        const Readers in = readers_before(layer);
        const Changed q = in.of(down ? &C::query_down : &C::q);
        enter_layer(worker, l, down ? latent.query_down : layer.q);
        multiply(worker, {{down ? &latent.query_down : &layer.q, b_.mixed + (down ? down_at : 0), q},
                          {&layer.k, b_.mixed + k_at, in.of(&C::k)},
                          {&layer.v, b_.mixed + v_at, in.of(&C::v)}},
                 b_.x, outputs, false);
        if (down) {
            const int rank = latent.query_down.outputs;
            const edgellm::Rows normed = edgellm::Rows::in(b_.attended, rows_, rank);
            const Readers of_normed{&layer, rank, {&C::q}};
            every_row(
                worker,
                [&](int r) {
                    float* row = static_cast<float*>(edgellm::scratch(4 * size_t(rank)));
                    const float* x = b_.mixed + size_t(r) * outputs + down_at;
                    scaled_norm(x, {latent.query_norm, nullptr}, rank, latent.epsilon, row);
                    b_.adapters.keep(r, row, 0, rank);
                    quantize_groups(row, 0, rank / edgellm::GROUP, normed, r, false);
                },
                weights(layer.q), of_normed);
            multiply(worker, {{&layer.q, b_.mixed, of_normed.of(&C::q)}}, normed, outputs, false);
        }
        const HeadRows keys(b_.attended, rows_, latent.key());
        const Readers by_key{&layer, latent.key(), {&C::key_up}, 0, heads.heads};
        const auto enter_row = [&](int r) {
            const edgellm::Rope& rope = call_.ropes[layer.rope];
            const float* mixed = b_.mixed + size_t(r) * outputs;
            append_latent(kv_of(layer, span_of_[r]), rope, latent, layer.slot, position(r), mixed + k_at, mixed + v_at);
            for (int h = 0; h < heads.heads; ++h) {
                const float* q = mixed + size_t(h) * (rotated + latent.key());
                rotate(rope, q, rotated, position(r), b_.q + size_t(r) * heads.width() + h * heads.key_dim);
                b_.adapters.keep(r, q + rotated, h * latent.key(), latent.key());
                keys.quantize(q + rotated, h, r);
            }
        };
        every_row(worker, enter_row, {}, by_key);
        multiply_heads(worker, latent.key_up, heads.heads, keys, b_.q + rotated, heads.key_dim, by_key.of(&C::key_up));
        attention(worker, layer, heads);
        const HeadRows seen(b_.attended, rows_, latent.rank());
        const Readers by_seen{&layer, latent.rank(), {&C::value_up}, 0, heads.heads};
        const auto join_row = [&](int r) {
            float* out = static_cast<float*>(edgellm::scratch(4 * size_t(latent.rank())));
            for (int h = 0; h < heads.heads; ++h) {
                join_head(layer, heads, r, h, out);
                b_.adapters.keep(r, out, h * latent.rank(), latent.rank());
                seen.quantize(out, h, r);
            }
        };
        every_row(worker, join_row, {}, by_seen);
        multiply_heads(worker, latent.value_up, heads.heads, seen, b_.mixed, layer.o.inputs / heads.heads,
                       by_seen.of(&C::value_up));
        every_row(
            worker,
            [&](int r) {
                const float* values = b_.mixed + size_t(r) * layer.o.inputs;
                b_.adapters.keep(r, values, 0, layer.o.inputs);
                quantize_groups(values, 0, layer.o.inputs / edgellm::GROUP, mixer_out(layer), r, false);
            },
            weights(layer.o), readers_behind(layer));
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

    void run_attention(edgellm::Worker& worker, const edgellm::Layer& layer, int l) const {
        if (layer.latent.there()) return run_latent_attention(worker, layer, l);
        const edgellm::Heads& heads = places_.kinds[places_.kind_of[l]];
        const edgellm::Rows attended = mixer_out(layer);
        if (!layer.has_beside()) enter_layer(worker, l, layer.q);
        const int outputs = layer.mixed_outputs();
        using C = edgellm::LayerChanges;
        const Readers in = readers_before(layer);
        multiply(worker, {{&layer.q, b_.mixed, in.of(&C::q)},
                          {&layer.k, b_.mixed + layer.q.outputs, in.of(&C::k)},
                          {&layer.v, b_.mixed + layer.q.outputs + layer.k.outputs, in.of(&C::v)},
                          {&layer.output_gate, b_.mixed + layer.qkv_outputs(), in.of(&C::q_gate)},
                          {&layer.laurel.left, b_.mixed + layer.laurel_at()}},
                 b_.x, outputs, false);
        every_row(worker, [&](int r) {
            float *qkv = b_.mixed + size_t(r) * outputs, *q = b_.q + size_t(r) * heads.width();
            const edgellm::Rope& rope = call_.ropes[layer.rope];
            add_biases(layer, qkv);
            if (const int groups = layer.laurel.left.outputs / edgellm::GROUP)
                quantize_groups(qkv + layer.laurel_at(), 0, groups, laurel_rows(layer), r, false);
            if (!layer.has_own_kv())
                return turn_queries(rope, layer.head_norms, heads.heads, heads.head_dim, position(r), qkv, q);
            float* k = qkv + layer.q.outputs;
            if (layer.v.panels == nullptr) std::memcpy(k + layer.k.outputs, k, 4 * size_t(layer.k.outputs));
            append_token(kv_of(layer, span_of_[r]), rope, layer.head_norms, layer.slot, heads.heads, position(r), qkv,
                         q);
        });
        if (layer.has_own_kv()) seal_blocks(worker, layer);
        if (heads.chooses) choose(worker, layer, heads);
        attention(worker, layer, heads);
        every_row(
            worker, [&](int r) { join_splits(layer, heads, attended, r); }, weights(layer.o), readers_behind(layer));
    }

    // Seals the blocks that a row of a span is the first to read so.
    void seal_blocks(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        if (!call_.pools[layer.pool].seals()) return;
        const int heads = call_.pools[layer.pool].kv_heads;
        const auto blocks = [&](int s) {
            const edgellm::Span& span = call_.spans[s];
            const int first = edgellm::KV::sealed_end(span.start);
            return std::pair<int, int>{first, edgellm::KV::sealed_end(span.start + span.rows) - first};
        };
        int count = 0;
        for (int s = 0; s < call_.span_count; ++s) count += heads * blocks(s).second;
        if (count == 0) return;
        worker.each(count, [&](int item) {
            int s = 0;
            for (; item >= heads * blocks(s).second; ++s) item -= heads * blocks(s).second;
            seal(kv_of(layer, s), layer.slot, item % heads, blocks(s).first + item / heads);
        });
    }

    // The rows between the two products that a layer adds beside attention.
    edgellm::Rows laurel_rows(const edgellm::Layer& layer) const {
        return edgellm::Rows::in(b_.activated, rows_, layer.laurel.left.outputs);
    }

    // The residual behind attention, and behind what a layer adds beside it.
    void complete_attention(int r, const edgellm::Layer& layer) const {
        if (!layer.has_laurel()) return complete(r, layer.o_bias, layer.post_attention_norm);
        const int hidden = model_.hidden;
        float *x = b_.residual + size_t(r) * hidden, *added = b_.laurel + size_t(r) * hidden;
        float* normed = static_cast<float*>(edgellm::scratch(4 * size_t(hidden)));
        scaled_norm(added, {layer.laurel.post_norm, nullptr}, hidden, model_.epsilon, normed);
        std::memcpy(added, normed, 4 * size_t(hidden));
        scaled_norm(x, layer.attention_norm, hidden, model_.epsilon, normed);
        add_to(added, normed, hidden);
        complete(r, layer.o_bias, layer.post_attention_norm);
        for (int i = 0; i < hidden; i += LANES) store(x + i, (load(x + i) + load(added + i)) * splat(0.70710678f));
    }

    // Many rows are taken some at a time: the numbers of 16 that are quantized fill whole cache lines. `readers`: what
    // will read the rows that it keeps for adapters.
    template <typename Row>
    void every_row(edgellm::Worker& worker, const Row& row, const edgellm::Ahead& ahead = {},
                   const Readers& readers = {}) const {
        const int run = std::max(1, std::min(16, rows_ / (4 * call_.threads)));
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

    // What the residual adds, now or, where a norm comes before that, in `complete`.
    void add_product(edgellm::Worker& worker, const edgellm::Linear& linear, const Changed& changed,
                     const edgellm::Rows& x, const edgellm::Norm& post) const {
        if (post.weight)
            multiply(worker, {{&linear, b_.branch, changed}}, x, model_.hidden, false);
        else
            multiply(worker, {{&linear, b_.residual, changed}}, x, model_.hidden, true);
    }

    // The output projection of a layer's mixer, and the second product of what it adds beside attention.
    void multiply_out(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        const Changed o = readers_behind(layer).of(&edgellm::LayerChanges::o);
        if (!layer.has_laurel()) return add_product(worker, layer.o, o, mixer_out(layer), layer.post_attention_norm);
        const edgellm::Rows beside = laurel_rows(layer);
        multiply(worker, {{&layer.o, b_.branch, o}, {&layer.laurel.right, b_.laurel, {}, &beside}}, mixer_out(layer),
                 model_.hidden, false);
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

    // The cache as a span sees it.
    edgellm::KV kv_of(const edgellm::Layer& layer, int span) const {
        edgellm::KV kv = call_.pools[layer.pool];
        kv.table = call_.spans[span].tables[layer.pool];
        if (kv.seals()) kv.sealed.table = call_.spans[span].tables[kv.sealed_pool];
        return kv;
    }

    int position(int r) const {
        const int span = span_of_[r];
        return call_.spans[span].start + r - places_.spans[span].row;
    }

    // Where the blocks begin that row `r` of a KV head reads.
    int32_t* chosen(const edgellm::Heads& heads, int r, int kv_head) const {
        return b_.chosen + (size_t(r) * heads.kv_heads + kv_head) * places_.chosen;
    }

    edgellm::Queries queries_of(const edgellm::Layer& layer, const edgellm::Heads& heads, int s) const {
        const edgellm::Span& span = call_.spans[s];
        const float* q = b_.q + size_t(places_.spans[s].row) * heads.width();
        return {q,           heads.heads,   span.rows,   span.start, layer.window,
                span.kv_read, layer.scale, layer.softcap, layer.sinks};
    }

    // The blocks that rows of answers read.
    void choose(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        worker.each(rows_ * heads.kv_heads, [&](int item) {
            const int r = item / heads.kv_heads, kv_head = item % heads.kv_heads, span = span_of_[r];
            if (!heads.spans[span].chooses) return;
            const int first = (r - places_.spans[span].row) * heads.group;
            const AttendTask task{layer.slot, kv_head, first, heads.group, 0, 0, nullptr, {}, {}};
            choose_blocks(kv_of(layer, span), queries_of(layer, heads, span), task, chosen(heads, r, kv_head));
        });
    }

    // What row `row` of a KV head of a span comes to over a split of the keys.
    float* part(const edgellm::Heads& heads, int span, int split, int kv_head, int row) const {
        const size_t head = size_t(split) * heads.kv_heads + kv_head;
        const size_t at = heads.spans[span].part + head * call_.spans[span].rows * heads.group + row;
        return b_.parts + at * (heads.value_dim + 2);
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

    // The blocks that the first row of a task has chosen, of those of a span that does.
    edgellm::BlockList chosen(const edgellm::Heads& heads, const Attention& at) const {
        if (!heads.spans[at.span].chooses) return {};
        const int row = places_.spans[at.span].row + at.run;
        return {chosen(heads, row, at.kv_head),
                edgellm::blocks_read(position(row), call_.spans[at.span].kv_read), 0};
    }

    // The block that a task begins with.
    edgellm::BlockPlace first_place(const edgellm::Layer& layer, const edgellm::Heads& heads,
                                    const Attention& at) const {
        const edgellm::Span& span = call_.spans[at.span];
        const edgellm::KV kv = kv_of(layer, at.span);
        edgellm::BlockList blocks = chosen(heads, at);
        if (blocks.count == 0) blocks = edgellm::blocks_seen(kv, span.start + span.rows - 1);
        const int block = blocks[std::min(at.split * edgellm::SPLIT_BLOCKS, blocks.count - 1)];
        return kv.place(block * edgellm::BLOCK, span.start, layer.slot, at.kv_head);
    }

    void attention(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        const int items = heads.tasks();
        worker.each(items, [&](int item) {
            const Attention at = attention_of(heads, item);
            const edgellm::Span& span = call_.spans[at.span];
            const edgellm::Tasks& tasks = heads.spans[at.span];
            const int first = at.run * tasks.run, rows = std::min(tasks.run, span.rows * heads.group - first);
            const edgellm::BlockList blocks = chosen(heads, at);
            const int last = span.start + (first + rows - 1) / heads.group;
            const int all = blocks.count ? blocks.splits() : edgellm::split_count(last + 1);
            const int from = tasks.splits == 1 ? 0 : at.split, to = tasks.splits == 1 ? all : from + 1;
            // threads that are equally fast take turns
            const Attention next = attention_of(heads, std::min(item + call_.threads, items - 1));
            attend_rows(kv_of(layer, at.span), queries_of(layer, heads, at.span),
                        {layer.slot, at.kv_head, first, rows, from, to,
                         part(heads, at.span, at.split, at.kv_head, first), first_place(layer, heads, next), blocks});
        });
    }

    // What a head of a row comes to over all splits of the keys, `out` [value_dim].
    void join_head(const edgellm::Layer& layer, const edgellm::Heads& heads, int r, int head, float* out) const {
        const int span = span_of_[r], group = heads.group, kv_head = head / group;
        const int row = (r - places_.spans[span].row) * group + head % group;
        float* sum = part(heads, span, 0, kv_head, row);
        for (int s = 1; s < heads.spans[span].splits; ++s)
            join(sum, part(heads, span, s, kv_head, row), heads.value_dim);
        finish_row(call_.pools[layer.pool], sum, layer.sinks, head, out);
    }

    void join_splits(const edgellm::Layer& layer, const edgellm::Heads& heads, const edgellm::Rows& attended,
                     int r) const {
        float* out = static_cast<float*>(edgellm::scratch(4 * size_t(heads.width())));
        for (int head = 0; head < heads.heads; ++head) join_head(layer, heads, r, head, out + head * heads.head_dim);
        if (layer.output_gate.panels) {
            const float* gate = b_.mixed + size_t(r) * layer.mixed_outputs() + layer.qkv_outputs();
            for (int i = 0; i < heads.width(); i += LANES) store(out + i, load(out + i) * sigmoid(load(gate + i)));
        }
        b_.adapters.keep(r, out, 0, heads.width());
        quantize_groups(out, 0, heads.width() / edgellm::GROUP, attended, r, false);
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
            if (layer.shared.experts_norm) return enter_beside(r, layer);
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
            if (layer.shared.post_norm) return join_beside(r, layer);
            b_.experts.sum(layer, r, (behind ? b_.branch : b_.residual) + r * hidden, !behind);
        });
    }

    // The rows that an MLP beside experts reads, that these read, and that their router reads.
    void enter_beside(int r, const edgellm::Layer& layer) const {
        const float* x = b_.residual + size_t(r) * model_.hidden;
        const edgellm::SharedExpert& shared = layer.shared;
        scaled_norm(x, {shared.experts_norm, nullptr}, model_.hidden, model_.epsilon, b_.experts.normed(r));
        scaled_norm(x, {shared.router_norm, nullptr}, model_.hidden, model_.epsilon, b_.experts.routed(r));
        normalize(layer.mlp_norm, r, false);
    }

    // What they give together, which the norm behind the layer's MLPs takes.
    void join_beside(int r, const edgellm::Layer& layer) const {
        const edgellm::SharedExpert& shared = layer.shared;
        float* out = b_.branch + size_t(r) * model_.hidden;
        float* sum = static_cast<float*>(edgellm::scratch(4 * size_t(model_.hidden)));
        b_.experts.sum(layer, r, sum, false);
        scaled_norm(sum, {shared.experts_post_norm, nullptr}, model_.hidden, model_.epsilon, out);
        scaled_norm(b_.experts.shared_out(r), {shared.post_norm, nullptr}, model_.hidden, model_.epsilon, sum);
        add_to(out, sum, model_.hidden);
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
    edgellm::run_team(call.threads, job.phases(), [&](edgellm::Worker& worker) { job.run(worker); });
    buffers.experts.leave(*call.model);
    return !job.stopped();
}

inline size_t workspace(const edgellm::StepCall& call) {
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

// What the experts of a layer that has some give.
inline void experts(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    const size_t before = reinterpret_cast<uintptr_t>(call.workspace) % 64, hidden = call.model->hidden;
    const ExpertsAlone alone(call, call.workspace + (64 - before), bytes);
    const Experts& experts = alone.experts;
    const edgellm::Layer& layer = call.model->layers[call.layer];
    constexpr int PHASES = 7;
    edgellm::run_team(call.threads, PHASES, [&](edgellm::Worker& worker) {
        worker.each(call.count, [&](int r) {
            std::memcpy(experts.normed(r), call.x + r * hidden, 4 * hidden);
            if (layer.shared.up.panels)
                quantize_groups(experts.normed(r), 0, call.model->hidden / edgellm::GROUP, alone.x, r, false);
        });
        experts.run(worker, *call.model, call.layer, alone.x);
        worker.each(call.count, [&](int r) { experts.sum(layer, r, call.y + r * hidden, false); });
    });
    experts.leave(*call.model);
}

inline size_t experts_workspace(const edgellm::ExpertsCall& call) {
    size_t bytes = 0;
    const ExpertsAlone alone(call, nullptr, bytes);
    return bytes + 64;
}
