// Mamba-2 between its linear layers; included once for each instruction set.
//
// A prompt's rows go through the states one after the other, as an answer's do, so that a row's bits do not depend on
// where a prompt is cut. What makes many rows fast: LANE_BLOCK channels of a head take all of them in turn, and their
// states, 8 KB where a channel has 128 numbers, stay in the nearest cache.

// log(1 + e^x), to 1e-7 of its value: with e = e^-|x| and s = e / (2 + e), log(1 + e) = 2 (s + s^3 / 3 + s^5 / 5 ...)
inline Vec softplus(Vec x) {
    const Vec e = exp_negative(-magnitude(x)), s = e / (splat(2.0f) + e), square = s * s;
    Vec sum = splat(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) sum = sum * square + splat(1.0f / static_cast<float>(odd));
    return larger(x, Vec{}) + splat(2.0f) * s * sum;
}

// Where a row behind the convolution has what LANE_BLOCK channels of a head need.
struct HeadPart {
    size_t x, b, c, step, decay;  // step, decay: of the head
    int state_dim;
    float skip;
};

// Take ROWS rows, `stride` apart, of LANE_BLOCK channels through their states, from `from` to `to`, which may be the
// same; x becomes y. Fused by hand: a row has the same bits whether it comes alone or with others, that share loads and
// stores of the states.
template <int ROWS>
inline void scan_rows(const float* from, float* to, float* first, size_t stride, const HeadPart& part) {
    constexpr int PARTS = edgellm::LANE_BLOCK / LANES, CHAINS = 4 / PARTS;  // four sums hide the latency
    Vec in[ROWS][PARTS], keep[ROWS], sum[ROWS][CHAINS * PARTS] = {};
    const float *b = first + part.b, *c = first + part.c;
    unrolled<ROWS>([&](int r) {
        const float* row = first + r * stride;
        for (int p = 0; p < PARTS; ++p) in[r][p] = load(row + part.x + p * LANES) * splat(row[part.step]);
        keep[r] = splat(row[part.decay]);
    });
    for (int n = 0; n < part.state_dim; n += CHAINS)
        unrolled<CHAINS * PARTS>([&](int i) {
            const int number = n + i / PARTS, p = i % PARTS;
            const size_t at = size_t(number) * edgellm::LANE_BLOCK + p * LANES;
            Vec state = load(from + at);
            unrolled<ROWS>([&](int r) {
                state = fused(state, keep[r], in[r][p] * splat(b[r * stride + number]));
                sum[r][i] = fused(state, splat(c[r * stride + number]), sum[r][i]);
            });
            store(to + at, state);
        });
    unrolled<ROWS>([&](int r) {
        float* x = first + r * stride + part.x;
        for (int p = 0; p < PARTS; ++p) {
            Vec y = sum[r][p];
            for (int chain = 1; chain < CHAINS; ++chain) y += sum[r][chain * PARTS + p];
            store(x + p * LANES, fused(load(x + p * LANES), splat(part.skip), y));
        }
    });
}

// The op on the rows of all spans, in three phases: `mix`, `scan`, and `finish` of each row.
class Mamba2 {
public:
    // `mixed` [rows, mixed] is written over.
    Mamba2(const edgellm::Mamba2& layer, const edgellm::Mixing& mixing, float* mixed)
        : m_(layer), mixing_(mixing), mixed_(mixed) {}

    // Convolve x, B and C of all rows, and make steps and decays of their dt.
    void mix(edgellm::Worker& worker) const {
        const int count = mixing_.call.count, run = std::max(1, std::min(16, count / (4 * mixing_.call.threads)));
        const int pieces = (m_.channels() + PIECE - 1) / PIECE;
        worker.each((count + run - 1) / run * pieces, [&](int item) {
            const int first = item / pieces * run, piece = item % pieces * PIECE;
            for (int r = first; r < std::min(count, first + run); ++r) {
                convolve(r, piece, std::min(m_.channels(), piece + PIECE));
                if (piece == 0) take_steps(r);
            }
        });
    }

    // Take all rows through the states; the last item of a span is for the rows that convolutions see later.
    void scan(edgellm::Worker& worker) const {
        const int items = m_.head_blocks() + 1;
        worker.each(mixing_.span_count() * items, [&](int item) {
            if (item % items < m_.head_blocks())
                scan_block(item / items, item % items);
            else
                keep_rows(item / items);
        });
    }

    // The gated norm of a row, or where it has no weight the gate alone.
    void finish(int r, float* out) const {
        const float *y = mixed_ + size_t(r) * m_.mixed(), *z = mixing_.row(r);
        const int width = m_.inner() / m_.groups;
        for (int g = 0; g < m_.inner(); g += width) {
            for (int i = g; i < g + width; i += LANES)
                store(out + i, load(y + i) * activated(load(z + i), edgellm::SILU));
            if (!m_.norm) continue;
            const Vec scale = splat(inverse_rms(out + g, width, m_.epsilon));
            for (int i = g; i < g + width; i += LANES) store(out + i, load(out + i) * scale * load(m_.norm + i));
        }
    }

private:
    static constexpr int PIECE = 512;   // channels of an item: a row alone makes work for some threads
    static constexpr int TOGETHER = 2;  // rows of a scan: 1.3 times as fast as one by one

    int first_row(int span) const { return mixing_.places.spans[span].row; }
    int rows(int span) const { return mixing_.call.spans[span].rows; }
    const edgellm::StateTarget* targets(int span) const { return mixing_.call.spans[span].states[mixing_.pool].targets; }

    // x, B and C of the row that stands `row` rows behind `first`, before which the sequence has a state; from the
    // state itself where `row` is below 0. Null: zeros.
    const float* inputs(int first, const float* state, int row) const {
        if (row >= 0) return mixing_.row(first + row) + m_.inner();
        return state ? state + size_t(m_.taps - 1 + row) * m_.channels() : nullptr;
    }

    void convolve(int r, int begin, int end) const {
        int span = 0;
        while (r >= first_row(span + 1)) ++span;
        alignas(64) static constexpr float NONE[PIECE] = {};
        const int before = m_.taps - 1, row = r - first_row(span);
        float* out = mixed_ + size_t(r) * m_.mixed();
        for (int i = begin; i < end; i += LANES) store(out + i, m_.conv_bias ? load(m_.conv_bias + i) : Vec{});
        for (int tap = 0; tap <= before; ++tap) {
            const float* x = inputs(first_row(span), mixing_.before(span), row + tap - before);
            x = x ? x + begin : NONE;
            const float* weight = m_.conv + size_t(tap) * m_.channels() + begin;
            for (int i = 0; i < end - begin; i += LANES)
                store(out + begin + i, fused(load(weight + i), load(x + i), load(out + begin + i)));
        }
        for (int i = begin; i < end; i += LANES) store(out + i, activated(load(out + i), edgellm::SILU));
    }

    void take_steps(int r) const {
        const float* dt = mixing_.row(r) + m_.inner() + m_.channels();
        float* steps = mixed_ + size_t(r) * m_.mixed() + m_.channels();
        for (int h = 0; h < m_.heads; h += LANES) {
            const int n = m_.heads - h;
            const Vec step = softplus(load_some(dt + h, n) + load_some(m_.dt_bias + h, n));
            store(steps + h, step);
            store(steps + m_.padded_heads() + h, exp_negative(step * load_some(m_.decay + h, n)));
        }
    }

    // LANE_BLOCK channels of a head, from one state that is wanted to the next.
    void scan_block(int span, int block) const {
        const size_t size = size_t(m_.state_dim) * edgellm::LANE_BLOCK, stride = m_.mixed();
        const size_t at = mixing_.state + m_.conv_size() + block * size;
        const HeadPart part = part_of(block);
        float* row = mixed_ + first_row(span) * stride;
        const float* before = mixing_.before(span);
        const float* from = before ? before - mixing_.state + at : nullptr;
        const edgellm::StateTarget* target = targets(span);
        for (int r = 0; r < rows(span); ++target) {
            float* to = target->block + at;
            if (!from) from = static_cast<float*>(std::memset(to, 0, 4 * size));
            for (int some; r < target->rows; r += some, row += some * stride, from = to) {
                some = target->rows - r < TOGETHER ? 1 : TOGETHER;
                if (some == 1)
                    scan_rows<1>(from, to, row, stride, part);
                else
                    scan_rows<TOGETHER>(from, to, row, stride, part);
            }
        }
    }

    HeadPart part_of(int block) const {
        const int channel = block * edgellm::LANE_BLOCK, head = channel / m_.head_dim;
        const size_t b = m_.inner() + size_t(head / (m_.heads / m_.groups)) * m_.state_dim;
        const size_t step = m_.channels() + head;
        return {size_t(channel), b, b + size_t(m_.groups) * m_.state_dim, step, step + m_.padded_heads(),
                m_.state_dim, m_.skip[head]};
    }

    void keep_rows(int span) const {
        const int before = m_.taps - 1;
        const size_t bytes = 4 * size_t(m_.channels());
        const float* state = mixing_.before(span);
        const edgellm::StateTarget* target = targets(span);
        for (int done = 0; done < rows(span); done = target++->rows) {
            const int first = first_row(span) + done, now = target->rows - done;
            float* to = target->block + mixing_.state;
            for (int i = 0; i < before; ++i) {  // the oldest first: `state` may be this one
                const float* x = inputs(first, state, now + i - before);
                if (x)
                    std::memmove(to + i * m_.channels(), x, bytes);
                else
                    std::memset(to + i * m_.channels(), 0, bytes);
            }
            state = to;
        }
    }

    const edgellm::Mamba2& m_;
    const edgellm::Mixing& mixing_;
    float* mixed_;
};

inline void mamba2(const edgellm::Mamba2Call& call) {
    const edgellm::RowsAlone alone(call.spans, call.span_count, call.count, call.threads);
    const edgellm::Mixing mixing = alone.mixing(call.rows, call.layer.inputs());
    const Mamba2 op(call.layer, mixing, call.mixed);
    edgellm::run_team(call.threads, 3, [&](edgellm::Worker& worker) {
        op.mix(worker);
        op.scan(worker);
        worker.each(call.count, [&](int r) { op.finish(r, call.out + size_t(r) * call.layer.inner()); });
    });
}
