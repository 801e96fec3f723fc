// The gated delta net over the rows of spans; included once for each instruction set.
//
// The recurrence is computed row after row, so that its bits are the same however a prompt is cut. A task takes
// STATE_COLUMNS columns of one head's matrix through all rows of a span: they stay in the first-level cache, and one
// pass over them adds what one row leaves and reads what the next one asks for. It is as fast as the arithmetic: 4
// operations a number (140 ns for a row and 16 columns with AVX-512 at 2 GHz; 200 with 16 columns in a pass).

class DeltaNetRows {
public:
    // `state`: where the layer's state begins in a target's block.
    DeltaNetRows(const edgellm::DeltaNet& net, const float* in, float* workspace, std::vector<edgellm::StateRows> spans,
                 size_t state, int rows, int threads)
        : net_(net), in_(in), b_(edgellm::DeltaNetBuffers::in(workspace, net, rows)), spans_(std::move(spans)),
          state_(state), rows_(rows), first_(spans_.size() + 1) {
        for (size_t s = 0; s < spans_.size(); ++s) first_[s + 1] = first_[s] + spans_[s].rows;
        // one row is too little for a task of its own
        columns_at_once_ = rows_ < 8 * span_count() ? net.value_dim : edgellm::STATE_COLUMNS;
        rows_at_once_ = std::max(1, std::min(16, rows_ * net.key_heads / (8 * threads)));
    }

    // All of it but the norms and gates of the outputs, in two phases.
    void run(edgellm::Worker& worker) const {
        const int runs = (rows_ + rows_at_once_ - 1) / rows_at_once_;
        worker.each(runs * net_.key_heads, [&](int item) {
            const int head = item / runs, begin = item % runs * rows_at_once_;
            for (int r = begin; r < std::min(rows_, begin + rows_at_once_); ++r) prepare(r, head);
        });
        const int parts = net_.value_dim / columns_at_once_, tasks = net_.value_heads * parts;
        worker.each(span_count() * (tasks + 1), [&](int item) {
            const int span = item / (tasks + 1), task = item % (tasks + 1);
            if (task == tasks) return store_columns(span);
            const int begin = task % parts * columns_at_once_;
            for (int c = begin; c < begin + columns_at_once_; c += WIDTH) recur(span, task / parts, c);
        });
    }

    // The outputs of a row, normalized and gated: `out` is [value_heads, value_dim].
    void finish(int r, float epsilon, float* out) const {
        const float* gate = row(r) + net_.z_at();
        for (int head = 0; head < net_.value_heads; ++head) {
            const float* o = value(head, r);
            const Vec scale = splat(inverse_rms(o, net_.value_dim, epsilon));
            for (int d = 0; d < net_.value_dim; d += LANES) {
                const Vec normed = load(o + d) * scale * load(net_.norm + d);
                store(out + d, normed * activated(load(gate + d), edgellm::SILU));
            }
            out += net_.value_dim;
            gate += net_.value_dim;
        }
    }

private:
    int span_count() const { return static_cast<int>(spans_.size()); }
    const float* row(int r) const { return in_ + size_t(r) * net_.outputs(); }
    float* key(int head, int r) const { return b_.keys + (size_t(head) * rows_ + r) * 2 * net_.key_dim; }
    float* value(int head, int r) const { return b_.values + (size_t(head) * rows_ + r) * net_.value_dim; }
    float* numbers(int head, int r) const { return b_.numbers + (size_t(head) * rows_ + r) * 3; }

    int span_of(int r) const {
        return static_cast<int>(std::upper_bound(first_.begin(), first_.end(), r) - first_.begin()) - 1;
    }

    // The inputs of the convolution for row `r`, the oldest first, the last its own. Those before the first row of a
    // sequence are not there.
    struct Taps {
        int first;
        const float* rows[edgellm::MOST_DELTA_TAPS];
    };
    Taps taps_of(int r) const {
        const int span = span_of(r), before = net_.taps - 1;
        const float* source = spans_[span].source;
        Taps taps{source ? 0 : std::max(0, before - (r - first_[span])), {}};
        for (int i = taps.first; i <= before; ++i) {
            const int at = r - before + i, old = at - first_[span] + before;
            taps.rows[i] = at >= first_[span] ? row(at) : source + size_t(old) * net_.channels();
        }
        return taps;
    }

    // SiLU of the convolution of `count` channels from `channel` on.
    void convolve(Taps taps, int channel, int count, float* out) const {
        const int end = net_.taps, channels = net_.channels();  // read once: a store of a vector may change all else
        const float* conv = net_.conv + channel;
        for (int c = 0; c < count; c += LANES) {
            Vec sum = {};
            for (int i = taps.first; i < end; ++i)
                sum += load(taps.rows[i] + channel + c) * load(conv + size_t(i) * channels + c);
            store(out + c, activated(sum, edgellm::SILU));
        }
    }

    // x / |x| * scale
    void unit(float* x, float scale) const {
        Vec squares = {};
        for (int i = 0; i < net_.key_dim; i += LANES) squares += load(x + i) * load(x + i);
        const Vec factor = splat(scale / std::sqrt(sum_of(squares) + 1e-6f));
        for (int i = 0; i < net_.key_dim; i += LANES) store(x + i, load(x + i) * factor);
    }

    // q, k and v of a row for one key head and its value heads, how much these forget, and learn.
    void prepare(int r, int head) const {
        const int dim = net_.key_dim;
        const Taps taps = taps_of(r);
        float *k = key(head, r), *q = k + dim;
        convolve(taps, head * dim, dim, q);
        convolve(taps, net_.keys() + head * dim, dim, k);
        unit(q, 1.0f / std::sqrt(static_cast<float>(dim)));
        unit(k, 1.0f);
        Vec product = {};
        for (int i = 0; i < dim; i += LANES) product += load(k + i) * load(q + i);
        const float both = sum_of(product), *a = row(r) + net_.a_at(), *b = row(r) + net_.b_at();
        for (int i = 0; i < net_.ratio(); ++i) {
            const int value_head = net_.value_head_of(head, i);
            convolve(taps, 2 * net_.keys() + value_head * net_.value_dim, net_.value_dim, value(value_head, r));
            const float t = a[value_head] + net_.dt_bias[value_head];
            const float softplus = t > 20 ? t : std::log1p(std::exp(t));
            float* number = numbers(value_head, r);
            number[0] = std::exp(net_.decay[value_head] * softplus);
            number[1] = 1 / (1 + std::exp(-b[value_head]));
            number[2] = both;
        }
    }

    static constexpr int VECTORS = LANES >= 8 ? 2 : 4;  // of columns that a pass takes
    static constexpr int WIDTH = VECTORS * LANES;
    struct Columns {
        Vec v[VECTORS];
    };

    // One pass over WIDTH columns of a matrix S: to = S e^g + k * change, and their products with the next row's k and
    // q. One function, not inlined, for the first and the last pass as well: all are to round alike.
    static __attribute__((noinline)) void pass(const float* from, float* to, int key_dim, const float* k, float forget,
                                               const Columns& change, const float* next, Columns& by_k,
                                               Columns& by_q) {
        constexpr int TURNS = 4 / VECTORS;  // sums that do not wait for each other
        Vec k_sum[TURNS * VECTORS] = {}, q_sum[TURNS * VECTORS] = {}, add[VECTORS];
        const Vec decay = splat(forget);
        unrolled<VECTORS>([&](auto v) { add[v] = change.v[v]; });
        for (int i = 0; i < key_dim; i += TURNS)
            unrolled<TURNS>([&](auto t) {
                const Vec old = splat(k[i + t]), by = splat(next[i + t]), query = splat(next[key_dim + i + t]);
                unrolled<VECTORS>([&](auto v) {
                    const size_t at = size_t(i + t) * edgellm::STATE_COLUMNS + v * LANES;
                    const Vec s = load(from + at) * decay + old * add[v];
                    store(to + at, s);
                    k_sum[t * VECTORS + v] += s * by;
                    q_sum[t * VECTORS + v] += s * query;
                });
            });
        unrolled<VECTORS>([&](auto v) {
            for (int t = 1; t < TURNS; ++t) {
                k_sum[v] += k_sum[t * VECTORS + v];
                q_sum[v] += q_sum[t * VECTORS + v];
            }
            by_k.v[v] = k_sum[v];
            by_q.v[v] = q_sum[v];
        });
    }

    // Columns of a value head through all rows of a span. With S the matrix before a row, v' = beta (v - e^g S^T k) is
    // what it changes by, and its output is e^g S^T q + (k * q) v'.
    void recur(int span, int head, int first) const {
        const edgellm::StateRows& at = spans_[span];
        const int dim = net_.key_dim, key_head = net_.key_head_of(head), inner = first % edgellm::STATE_COLUMNS;
        const size_t offset = net_.columns() + head * net_.matrix() + size_t(first - inner) * dim + inner;
        float* s = static_cast<float*>(edgellm::scratch(4 * size_t(dim) * edgellm::STATE_COLUMNS));
        const float *from = at.source ? at.source + offset : s, *k = key(key_head, first_[span]);
        if (!at.source) std::fill(s, s + size_t(dim) * edgellm::STATE_COLUMNS, 0.0f);
        Columns change = {}, by_k, by_q;
        float forget = 1;
        const edgellm::StateTarget* target = at.targets;
        for (int r = first_[span]; r < first_[span + 1]; ++r) {
            const float *next = key(key_head, r), *number = numbers(head, r);
            pass(from, s, dim, k, forget, change, next, by_k, by_q);
            if (r - first_[span] == target->rows) {
                for (int i = 0; i < dim; ++i)
                    std::memcpy(target->block + state_ + offset + size_t(i) * edgellm::STATE_COLUMNS,
                                s + size_t(i) * edgellm::STATE_COLUMNS, 4 * WIDTH);
                ++target;
            }
            from = s;
            k = next;
            forget = number[0];
            const float learn = number[1], both = number[2];
            float* o = value(head, r) + first;
            unrolled<VECTORS>([&](auto v) {
                change.v[v] = (load(o + v * LANES) - by_k.v[v] * splat(forget)) * splat(learn);
                store(o + v * LANES, by_q.v[v] * splat(forget) + change.v[v] * splat(both));
            });
        }
        pass(from, target->block + state_ + offset, dim, k, forget, change, k, by_k, by_q);
    }

    // The last inputs of the convolution after the rows that each target names. One of few rows keeps some of those
    // of the target before it or of the source, which may be where they go: they move to the front.
    void store_columns(int span) const {
        const edgellm::StateRows& at = spans_[span];
        const int before = net_.taps - 1, channels = net_.channels();
        const float* from = at.source;
        const edgellm::StateTarget* target = at.targets;
        for (int done = 0; done < at.rows; done = target++->rows) {
            float* const block = target->block + state_;
            for (int i = 0; i < before; ++i) {
                const int row_of = target->rows - before + i;
                float* to = block + size_t(i) * channels;
                if (row_of >= done)
                    std::memcpy(to, row(first_[span] + row_of), 4 * size_t(channels));
                else if (from)
                    std::memmove(to, from + size_t(row_of - done + before) * channels, 4 * size_t(channels));
                else
                    std::fill(to, to + channels, 0.0f);
            }
            from = block;
        }
    }

    const edgellm::DeltaNet& net_;
    const float* in_;
    const edgellm::DeltaNetBuffers b_;
    const std::vector<edgellm::StateRows> spans_;
    const size_t state_;
    const int rows_;
    std::vector<int> first_;  // row of each span, and behind the last
    int columns_at_once_, rows_at_once_;
};

inline void delta_net(const edgellm::DeltaNetCall& call) {
    const DeltaNetRows rows(call.net, call.in, call.workspace, {call.spans, call.spans + call.span_count}, 0, call.rows,
                            call.threads);
    edgellm::run_team(call.threads, 3, [&](edgellm::Worker& worker) {
        rows.run(worker);
        worker.each(call.rows, [&](int r) { rows.finish(r, call.epsilon, call.out + size_t(r) * call.net.values()); });
    });
}
