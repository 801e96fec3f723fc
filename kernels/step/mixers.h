// Mixers of a step's layers: attention over the cache's blocks, and ops with states.

class StepMixers : protected StepRows {
protected:
    using StepRows::StepRows;

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
        if (heads.sparse) choose_by_mass(worker, layer, heads);
        attention(worker, layer, heads);
        every_row(
            worker, [&](int r) { join_splits(layer, heads, attended, r); }, weights(layer.o), readers_behind(layer));
        tell_shares(worker, layer, heads);
    }

    // Calls `work` with a span and an item of it, for so many items of each span as `items` says.
    template <typename Items, typename Work>
    void each_of_spans(edgellm::Worker& worker, const Items& items, const Work& work) const {
        int count = 0;
        for (int s = 0; s < call_.span_count; ++s) count += items(s);
        if (count == 0) return;
        worker.each(count, [&](int item) {
            int s = 0;
            for (; item >= items(s); ++s) item -= items(s);
            work(s, item);
        });
    }

    // Raises the shares that spans ask for to what their rows give to the keys of a layer.
    void tell_shares(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        constexpr int RUN = 8;  // blocks, for which queries are rounded once
        const auto items = [&](int s) {
            const edgellm::Span& span = call_.spans[s];
            const bool asked = span.shares && span.shares[layer.pool] && layer.has_own_kv();
            return asked ? (span.share_blocks + RUN - 1) / RUN * heads.kv_heads : 0;
        };
        each_of_spans(worker, items, [&](int s, int item) {
            const edgellm::Span& span = call_.spans[s];
            const int kv_head = item % heads.kv_heads, from = item / heads.kv_heads * RUN;
            const size_t head = size_t(layer.slot) * heads.kv_heads + kv_head;
            raise_shares(kv_of(layer, s), queries_of(layer, heads, s), layer.slot, kv_head, from,
                         std::min(from + RUN, span.share_blocks), part(heads, s, 0, kv_head, 0),
                         span.shares[layer.pool] + head * span.share_blocks * edgellm::BLOCK);
        });
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
        const auto items = [&](int s) { return heads * blocks(s).second; };
        each_of_spans(worker, items, [&](int s, int item) {
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

    // The output projection of a layer's mixer, and the second product of what it adds beside attention.
    void multiply_out(edgellm::Worker& worker, const edgellm::Layer& layer) const {
        const Changed o = readers_behind(layer).of(&edgellm::LayerChanges::o);
        if (!layer.has_laurel()) return add_product(worker, layer.o, o, mixer_out(layer), layer.post_attention_norm);
        const edgellm::Rows beside = laurel_rows(layer);
        multiply(worker, {{&layer.o, b_.branch, o}, {&layer.laurel.right, b_.laurel, {}, &beside}}, mixer_out(layer),
                 model_.hidden, false);
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

    // The cache as a span sees it.
    edgellm::KV kv_of(const edgellm::Layer& layer, int span) const {
        edgellm::KV kv = call_.pools[layer.pool];
        kv.table = call_.spans[span].tables[layer.pool];
        if (kv.seals()) kv.sealed.table = call_.spans[span].tables[kv.sealed_pool];
        if (call_.spans[span].heads) kv.heads = call_.spans[span].heads[layer.pool];
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
        const float mass = heads.sparse && span.chooses_panels() ? span.mass : 0;
        return {q,    heads.heads, span.rows,     span.start, layer.window, span.kv_read,
                mass, layer.scale, layer.softcap, layer.sinks};
    }

    // What whole blocks of a span's positions read; the lists share the place of `chosen`.
    edgellm::PanelLists lists(const edgellm::Heads& heads, int s) const {
        const edgellm::Span& span = call_.spans[s];
        const edgellm::BlockRange blocks = span.sparse_blocks();
        if (!heads.sparse || blocks.from == blocks.to) return {};
        const int first = (places_.spans[s].row + blocks.from * edgellm::BLOCK - span.start) / edgellm::BLOCK;
        const size_t stride = places_.chosen;
        return {b_.chosen + size_t(first) * heads.heads * stride, stride, heads.heads, blocks};
    }

    // Chooses what whole blocks of positions read.
    void choose_by_mass(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        each_of_spans(worker, [&](int s) { return lists(heads, s).count(); }, [&](int s, int item) {
            const edgellm::PanelLists lists = this->lists(heads, s);
            choose_panels(kv_of(layer, s), queries_of(layer, heads, s), layer.slot, item % heads.heads,
                          lists.of.to - 1 - item / heads.heads, lists);
        });
    }

    // Whether rows of a span choose among blocks on shortlists.
    bool has_shortlists(int s) const {
        const edgellm::Span& span = call_.spans[s];
        return span.shortlists && edgellm::sealed_blocks(span.start + span.rows - 1).count > span.listed;
    }

    // Chooses the blocks that rows of answers read, one row after another where some write shortlists for others.
    void choose(edgellm::Worker& worker, const edgellm::Layer& layer, const edgellm::Heads& heads) const {
        const auto runs = [&](int s) { return has_shortlists(s) ? 1 : call_.spans[s].rows; };
        const auto items = [&](int s) { return heads.spans[s].chooses ? heads.kv_heads * runs(s) : 0; };
        each_of_spans(worker, items, [&](int s, int item) {
            const edgellm::Span& span = call_.spans[s];
            const int kv_head = item % heads.kv_heads, first = item / heads.kv_heads, rows = span.rows / runs(s);
            for (int row = first; row < first + rows; ++row) {
                const AttendTask task{layer.slot, kv_head, row * heads.group, heads.group, 0, 0, nullptr, {}, {}, {}};
                int32_t* to = chosen(heads, places_.spans[s].row + row, kv_head);
                choose_blocks(kv_of(layer, s), queries_of(layer, heads, s), task, choice(layer, heads, s, task), to);
            }
        });
    }

    // The blocks among which a row chooses: all sealed ones, or those on a shortlist, which it writes if no row before
    // it has.
    edgellm::BlockList choice(const edgellm::Layer& layer, const edgellm::Heads& heads, int s,
                              const AttendTask& task) const {
        const edgellm::Span& span = call_.spans[s];
        const int position = span.start + task.first / heads.group, number = position / edgellm::SHORTLIST_ROWS;
        const edgellm::BlockList all = edgellm::sealed_blocks(position);
        if (!has_shortlists(s) || all.count <= span.listed) return all;
        // by layers, not slots: several layers may read K and V of one
        const size_t head = size_t(&layer - model_.layers) * heads.kv_heads + task.kv_head;
        int32_t* list = span.shortlists[layer.pool] +
                        (head * edgellm::SHORTLISTS + number % edgellm::SHORTLISTS) * (1 + size_t(span.listed));
        const int by = list[0] - 1;
        if (by < 0 || by >= position || by / edgellm::SHORTLIST_ROWS != number) {
            best_blocks(kv_of(layer, s), queries_of(layer, heads, s), task, all, span.listed, list + 1);
            list[0] = position + 1;
        }
        return {list + 1, span.listed, 0, 0, nullptr};
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
                edgellm::blocks_read(position(row), call_.spans[at.span].kv_read), 0, 0, nullptr};
    }

    // The block that a task begins with.
    edgellm::BlockPlace first_place(const edgellm::Layer& layer, const edgellm::Heads& heads,
                                    const Attention& at) const {
        const edgellm::Span& span = call_.spans[at.span];
        const edgellm::KV kv = kv_of(layer, at.span);
        edgellm::BlockList blocks = chosen(heads, at);
        if (blocks.count == 0) blocks = edgellm::blocks_seen(kv, span.start + span.rows - 1, layer.slot, at.kv_head);
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
            const int all = blocks.count ? blocks.splits() : edgellm::split_count(span.start + span.rows);
            const int from = tasks.splits == 1 ? 0 : at.split, to = tasks.splits == 1 ? all : from + 1;
            // threads that are equally fast take turns
            const Attention next = attention_of(heads, std::min(item + call_.threads, items - 1));
            attend_rows(kv_of(layer, at.span), queries_of(layer, heads, at.span),
                        {layer.slot, at.kv_head, first, rows, from, to,
                         part(heads, at.span, at.split, at.kv_head, first), first_place(layer, heads, next), blocks,
                         lists(heads, at.span)});
        });
    }

    // What a head of a row comes to over all splits of the keys, `out` [value_dim].
    void join_head(const edgellm::Layer& layer, const edgellm::Heads& heads, int r, int head, float* out) const {
        const int span = span_of_[r], kv_head = head / heads.group;
        const int row = queries_of(layer, heads, span)
                            .order(heads.kv_heads)
                            .row(r - places_.spans[span].row, head % heads.group);
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
};
