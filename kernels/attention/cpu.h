// Chunk attention over KV blocks; included once for each instruction set.
//
// A task is one KV head, a run of query rows and a run of key stretches. Row `r` of a KV head is token
// r / group, head r % group. A task walks over the key blocks once, four rows at a time, with the
// online softmax of FlashAttention (Dao et al., arXiv:2205.14135). On int8 blocks both products are
// made of integers:
//
//     q = (254 code + fine code) * q_scale, 16 bits a row     score = q_scale * k_scale[j] * (q . k)
//     w = softmax weight * v_scale[j]        w = (128 high + low) * w_scale, 14 bits a row and block
//
// Seven bits are what the AVX2 and NEON instructions take as an unsigned factor; one term of them
// would lose the many small weights that share a block with a large one.

constexpr int TILE = 4;  // rows
#if LANES == 16
constexpr int COLUMNS = 2;  // vectors of keys beside each other in a tile of scores
#else
constexpr int COLUMNS = 1;
#endif

// What one row of a stretch, or of several, comes to: largest score, sum of weights, weighted values.
// In memory: maximum, total, values[head_dim].
inline void join(float* into, const float* part, int head_dim) {
    if (part[1] == 0) return;
    if (into[1] == 0) {
        std::memcpy(into, part, sizeof(float) * (head_dim + 2));
        return;
    }
    const float top = into[0] > part[0] ? into[0] : part[0];
    const float a = exp_negative(splat(into[0] - top))[0];
    const float b = exp_negative(splat(part[0] - top))[0];
    into[0] = top;
    into[1] = into[1] * a + part[1] * b;
    for (int d = 2; d < head_dim + 2; ++d) into[d] = into[d] * a + part[d] * b;
}

// One row's softmax over keys low .. high of a block: scores become weights. Gives the factor by which
// what came before shrinks.
template <typename Rows, bool AHEAD>
inline float soften(float* scores, int low, int high, int width, float& maximum, float& total,
                    Rows& rows) {
    for (int j = 0; j < low; ++j) scores[j] = -INFINITY;
    for (int j = high; j < width; ++j) scores[j] = -INFINITY;
    Vec most = splat(maximum);
    for (int j = 0; j < width; j += LANES) most = larger(load(scores + j), most);
    const float top = max_of(most);
    const float shrink = maximum == -INFINITY ? 0.0f : exp_negative(splat(maximum - top))[0];
    Vec sum = {};
    for (int j = 0; j < width; j += LANES) {
        if (AHEAD) rows.fetch_ahead(4);
        const Vec weight = exp_negative(load(scores + j) - splat(top));
        sum += weight;
        store(scores + j, weight);
    }
    total = total * shrink + sum_of(sum);
    maximum = top;
    return shrink;
}

inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// The rows of a tile, at one block of keys.
struct TileState {
    float* scores;              // [TILE, BLOCK]
    float* values;              // [TILE, padded(head_dim)], weighted sums so far
    float shrink[TILE];
};

// Fetches the next block while this one is computed, a few cache lines at a time: more at once than
// the processor keeps track of would make it wait.
class Ahead {
public:
    Ahead() = default;
    Ahead(const int8_t* k, const int8_t* v, int lines) : k_(k), v_(v), lines_(lines) {}

    void fetch(int lines) {
        for (; lines > 0 && done_ < 2 * lines_; --lines, ++done_)
            __builtin_prefetch(done_ < lines_ ? k_ + 64 * done_ : v_ + 64 * (done_ - lines_));
    }

private:
    const int8_t *k_ = nullptr, *v_ = nullptr;
    int lines_ = 0, done_ = 0;
};

class Int8Rows {
public:
    static size_t bytes(int head_dim) {
        return edgellm::ROWS_PER_TASK * (2 * size_t(head_dim) + 12) + 2 * TILE * edgellm::BLOCK;
    }

    Int8Rows(const edgellm::KV& kv, char* memory) : kv_(kv), head_dim_(kv.head_dim) {
        scale_ = reinterpret_cast<float*>(memory);
        start_ = reinterpret_cast<int32_t*>(scale_ + edgellm::ROWS_PER_TASK);
        fine_start_ = start_ + edgellm::ROWS_PER_TASK;
        high_ = reinterpret_cast<int8_t*>(fine_start_ + edgellm::ROWS_PER_TASK);
        low_ = high_ + TILE * edgellm::BLOCK;
        codes_ = low_ + TILE * edgellm::BLOCK;
        fine_ = codes_ + edgellm::ROWS_PER_TASK * size_t(head_dim_);
    }

    void fetch_ahead(int lines) { ahead_.fetch(lines); }

    void set_query(int r, const float* q, float norm) {
        const size_t at = size_t(r) * head_dim_;
        const RowScale found = quantize_row(q, head_dim_, codes_ + at);
        scale_[r] = found.scale * norm / FINE_STEPS;
        start_[r] = START * found.total;
        fine_start_[r] = START * quantize_rest(q, head_dim_, found.scale, codes_ + at, fine_ + at);
    }

    // The block at `first_row` of the pool; the one at `next_row` will follow.
    void open(size_t first_row, size_t next_row, int) {
        k_ = static_cast<const int8_t*>(kv_.k) + first_row * head_dim_;
        v_ = static_cast<const int8_t*>(kv_.v) + first_row * head_dim_;
        k_scale_ = kv_.k_scale + first_row;
        v_scale_ = kv_.v_scale + first_row;
        ahead_ = Ahead(static_cast<const int8_t*>(kv_.k) + next_row * head_dim_,
                       static_cast<const int8_t*>(kv_.v) + next_row * head_dim_, 2 * head_dim_);
    }

    template <int R, bool AHEAD>
    void score(int first, int width, float* scores) {
        for (int j = 0; j < width; j += COLUMNS * LANES) {
            IVec sum[R][COLUMNS], rest[R][COLUMNS];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < COLUMNS; ++c) {
                    sum[r][c] = splat_int(start_[first + r]);
                    rest[r][c] = splat_int(fine_start_[first + r]);
                }
            for (int d = 0; d < head_dim_; d += 4) {
                Bytes key[COLUMNS];
                if (AHEAD) ahead_.fetch(1);
                for (int c = 0; c < COLUMNS; ++c)
                    key[c] = operand(load_bytes(k_ + kv_.key_place(j + c * LANES, d)));
                for (int r = 0; r < R; ++r) {
                    const size_t at = size_t(first + r) * head_dim_ + d;
                    const Bytes x = splat_quad(codes_ + at), y = splat_quad(fine_ + at);
                    for (int c = 0; c < COLUMNS; ++c) {
                        sum[r][c] = dot_signed(sum[r][c], key[c], x);
                        rest[r][c] = dot_signed(rest[r][c], key[c], y);
                    }
                }
            }
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < COLUMNS; ++c) {
                    const int at = j + c * LANES;
                    const Vec whole = to_float(sum[r][c] * FINE_STEPS + rest[r][c]);
                    store(scores + r * edgellm::BLOCK + at,
                          whole * (load(k_scale_ + at) * splat(scale_[first + r])));
                }
        }
    }

    template <int R, bool AHEAD>
    void add(TileState& tile, int count, int width) {
        float w_scale[R];
        for (int r = 0; r < R; ++r)
            w_scale[r] = split_weights<AHEAD>(tile.scores + r * edgellm::BLOCK, r * edgellm::BLOCK, width);
        const int quads = (count + 3) / 4, step = padded(head_dim_);
        constexpr int WIDE = LANES == 16 && R < 4 ? 4 : 2;  // as many as there are registers for
        int d = 0;
        for (; d + WIDE * LANES <= head_dim_; d += WIDE * LANES)
            add_columns<R, WIDE, false, AHEAD>(tile, d, quads, step, w_scale);
        for (; d + LANES <= head_dim_; d += LANES)
            add_columns<R, 1, false, AHEAD>(tile, d, quads, step, w_scale);
        if (d < head_dim_) add_columns<R, 1, true, AHEAD>(tile, d, quads, step, w_scale);
    }

private:
    // Weights times v_scale, as two terms of 7 bits; gives what the lower one counts.
    template <bool AHEAD>
    float split_weights(float* weights, int at, int width) {
        Vec most = {}, broken = {};
        for (int j = 0; j < width; j += LANES) {
            if (AHEAD) ahead_.fetch(2);
            const Vec p = load(weights + j);
            const Vec w = p > Vec{} ? p * load(v_scale_ + j) : Vec{};  // no row: no scale either
            most = larger(w, most);
            broken += w * splat(0.0f);
            store(weights + j, w);
        }
        const float top = max_of(most);
        const float inverse = top > 0 ? 16383.0f / top : 0.0f;
        for (int j = 0; j < width; j += LANES) {
            const Vec scaled = load(weights + j) * splat(inverse) + splat(0.5f);
            const IVec code = __builtin_convertvector(scaled, IVec) & 16383;
            store_narrow(high_ + at + j, code >> 7);
            store_narrow(low_ + at + j, code & 127);
        }
        return top * (1.0f / 16383) + sum_of(broken);
    }

    template <int R, int C, bool PART, bool AHEAD>
    void add_columns(TileState& tile, int d, int quads, int step, const float* w_scale) {
        IVec high[R][C] = {}, low[R][C] = {};
        for (int quad = 0; quad < quads; ++quad) {
            Bytes value[C];
            if (AHEAD) ahead_.fetch(2);
            for (int c = 0; c < C; ++c) {
                const size_t at = (size_t(quad) * head_dim_ + d + c * LANES) * 4;
                const int8_t* from = v_ + at;
                if (PART) {
                    value[c] = Bytes{};
                    std::memcpy(&value[c], from, 4 * (head_dim_ - d));
                } else {
                    value[c] = load_bytes(from);
                }
            }
            for (int r = 0; r < R; ++r) {
                const Bytes x = splat_quad(high_ + r * edgellm::BLOCK + 4 * quad);
                const Bytes y = splat_quad(low_ + r * edgellm::BLOCK + 4 * quad);
                for (int c = 0; c < C; ++c) {
                    high[r][c] = dot(high[r][c], x, value[c]);
                    low[r][c] = dot(low[r][c], y, value[c]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                float* out = tile.values + size_t(r) * step + d + c * LANES;
                const Vec sum = to_float((high[r][c] << 7) + low[r][c]);
                store(out, load(out) * splat(tile.shrink[r]) + sum * splat(w_scale[r]));
            }
    }

    const edgellm::KV& kv_;
    const int head_dim_;
    const int8_t *k_ = nullptr, *v_ = nullptr;
    Ahead ahead_;
    const float *k_scale_ = nullptr, *v_scale_ = nullptr;
    float* scale_;
    int32_t *start_, *fine_start_;
    int8_t *codes_, *fine_, *high_, *low_;
};

inline float number(float x) { return x; }
inline float number(uint16_t x) { return float_of_half(x); }

// Blocks of float32 or, as uint16_t, of float16: made float32 and turned around block by block.
template <typename T>
class FloatRows {
public:
    static size_t bytes(int head_dim) {
        const size_t wide = padded(head_dim);
        return 4 * (edgellm::ROWS_PER_TASK * size_t(head_dim) + 2 * edgellm::BLOCK * wide);
    }

    FloatRows(const edgellm::KV& kv, char* memory) : kv_(kv), head_dim_(kv.head_dim) {
        keys_ = reinterpret_cast<float*>(memory);
        values_ = keys_ + size_t(edgellm::BLOCK) * padded(head_dim_);
        queries_ = values_ + size_t(edgellm::BLOCK) * padded(head_dim_);
    }

    void fetch_ahead(int) {}

    void set_query(int r, const float* q, float norm) {
        for (int d = 0; d < head_dim_; ++d) queries_[size_t(r) * head_dim_ + d] = q[d] * norm;
    }

    void open(size_t first_row, size_t, int count) {
        const T* k = static_cast<const T*>(kv_.k) + first_row * head_dim_;
        const T* v = static_cast<const T*>(kv_.v) + first_row * head_dim_;
        const int step = padded(head_dim_);
        for (int d = 0; d < head_dim_; ++d)
            for (int j = 0; j < count; ++j) {
                keys_[d * edgellm::BLOCK + j] = number(k[kv_.key_place(j, d)]);
                values_[j * step + d] = number(v[kv_.value_place(j, d)]);
            }
        for (int d = 0; d < head_dim_; ++d)
            std::memset(keys_ + d * edgellm::BLOCK + count, 0, 4 * (edgellm::BLOCK - count));
    }

    template <int R, bool>
    void score(int first, int width, float* scores) const {
        for (int j = 0; j < width; j += LANES) {
            Vec sum[R] = {};
            for (int d = 0; d < head_dim_; ++d) {
                const Vec key = load(keys_ + d * edgellm::BLOCK + j);
                for (int r = 0; r < R; ++r)
                    sum[r] += splat(queries_[size_t(first + r) * head_dim_ + d]) * key;
            }
            for (int r = 0; r < R; ++r) store(scores + r * edgellm::BLOCK + j, sum[r]);
        }
    }

    template <int R, bool>
    void add(TileState& tile, int count, int) {
        const int step = padded(head_dim_);
        for (int d = 0; d < head_dim_; d += LANES) {
            Vec sum[R];
            for (int r = 0; r < R; ++r)
                sum[r] = load(tile.values + r * step + d) * splat(tile.shrink[r]);
            for (int j = 0; j < count; ++j) {
                const Vec value = load(values_ + j * step + d);
                for (int r = 0; r < R; ++r)
                    sum[r] += splat(tile.scores[r * edgellm::BLOCK + j]) * value;
            }
            for (int r = 0; r < R; ++r) store(tile.values + r * step + d, sum[r]);
        }
    }

private:
    const edgellm::KV& kv_;
    const int head_dim_;
    float *keys_, *values_, *queries_;
};

// Rows first .. first + rows of a KV head over key stretches from .. to; `parts` [rows, head_dim + 2].
struct AttendTask {
    int layer, kv_head, first, rows, from, to;
    float* parts;
};

template <typename Rows>
class Walk {
public:
    Walk(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task)
        : kv_(kv), queries_(queries), task_(task), group_(queries.heads / kv.kv_heads),
          step_(padded(kv.head_dim)), memory_(static_cast<char*>(edgellm::scratch(total_bytes()))),
          rows_(kv, memory_) {
        float* floats = reinterpret_cast<float*>(memory_ + (Rows::bytes(kv.head_dim) + 63) / 64 * 64);
        maximum_ = floats;
        total_ = maximum_ + edgellm::ROWS_PER_TASK;
        scores_ = total_ + edgellm::ROWS_PER_TASK;
        part_ = scores_ + TILE * edgellm::BLOCK;
        values_ = part_ + edgellm::MAX_HEAD_DIM + 2 + 14;
    }

    void run() {
        const float norm = 1.0f / std::sqrt(static_cast<float>(kv_.head_dim));
        for (int r = 0; r < task_.rows; ++r) {
            const int row = task_.first + r, head = task_.kv_head * group_ + row % group_;
            const size_t at = size_t(row / group_) * queries_.heads + head;
            rows_.set_query(r, queries_.q + at * kv_.head_dim, norm);
            task_.parts[size_t(r) * (kv_.head_dim + 2) + 1] = 0;
        }
        for (int s = task_.from; s < task_.to; ++s) stretch(s * edgellm::STRETCH);
    }

private:
    size_t total_bytes() const {
        const size_t floats = 2 * edgellm::ROWS_PER_TASK + TILE * edgellm::BLOCK +
                              edgellm::MAX_HEAD_DIM + 16 + edgellm::ROWS_PER_TASK * size_t(step_);
        return Rows::bytes(kv_.head_dim) + 64 + 4 * floats;
    }

    int position(int r) const { return queries_.start + (task_.first + r) / group_; }

    void stretch(int begin) {
        const int end = std::min(begin + edgellm::STRETCH, position(task_.rows - 1) + 1);
        for (int r = 0; r < task_.rows; ++r) {
            maximum_[r] = -INFINITY;
            total_[r] = 0;
        }
        std::memset(values_, 0, sizeof(float) * size_t(task_.rows) * step_);
        int low = begin;
        if (queries_.window > 0)
            low = std::max(begin, (position(0) + 1 - queries_.window) / edgellm::BLOCK * edgellm::BLOCK);
        for (int base = low; base < end; base += edgellm::BLOCK) {
            const int count = std::min(edgellm::BLOCK, end - base);
            const int next = base + edgellm::BLOCK < end ? base + edgellm::BLOCK : base;
            rows_.open(kv_.first_row(base, task_.layer, task_.kv_head),
                       kv_.first_row(next, task_.layer, task_.kv_head), count);
            tiles<true>(0, std::min(TILE, task_.rows), base, count);
            tiles<false>(TILE, task_.rows, base, count);
        }
        for (int r = 0; r < task_.rows; ++r) {
            part_[0] = maximum_[r];
            part_[1] = total_[r];
            std::memcpy(part_ + 2, values_ + size_t(r) * step_, sizeof(float) * kv_.head_dim);
            join(task_.parts + size_t(r) * (kv_.head_dim + 2), part_, kv_.head_dim);
        }
    }

    template <bool AHEAD>
    void tiles(int r, int end, int base, int count) {
        for (; r < end; r += TILE) {
            switch (end - r) {
                case 1: tile<1, AHEAD>(r, base, count); break;
                case 2: tile<2, AHEAD>(r, base, count); break;
                case 3: tile<3, AHEAD>(r, base, count); break;
                default: tile<4, AHEAD>(r, base, count);
            }
        }
    }

    template <int R, bool AHEAD>
    void tile(int r, int base, int count) {
        count = std::min(count, position(r + R - 1) + 1 - base);
        if (count <= 0) return;
        const int width = (count + LANES - 1) / LANES * LANES;
        rows_.template score<R, AHEAD>(r, width, scores_);
        TileState state{scores_, values_ + size_t(r) * step_, {}};
        for (int i = 0; i < R; ++i) {
            const int end = position(r + i) + 1;
            const int high = std::min(count, end - base);
            const int low = queries_.window > 0 ? std::max(0, end - queries_.window - base) : 0;
            float* scores = scores_ + i * edgellm::BLOCK;
            if (high <= low) {
                std::memset(scores, 0, sizeof(float) * width);
                state.shrink[i] = 1;
            } else {
                state.shrink[i] = soften<Rows, AHEAD>(scores, low, high, width, maximum_[r + i], total_[r + i], rows_);
            }
        }
        rows_.template add<R, AHEAD>(state, count, width);
    }

    const edgellm::KV& kv_;
    const edgellm::Queries& queries_;
    const AttendTask& task_;
    const int group_, step_;
    char* memory_;
    Rows rows_;
    float *maximum_, *total_, *scores_, *part_, *values_;
};

inline void attend_rows(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task) {
    switch (kv.format) {
        case edgellm::F32: return Walk<FloatRows<float>>(kv, queries, task).run();
        case edgellm::F16: return Walk<FloatRows<uint16_t>>(kv, queries, task).run();
        default: return Walk<Int8Rows>(kv, queries, task).run();
    }
}

inline void attend(const edgellm::AttendCall& call) {
    const edgellm::Queries& queries = call.queries;
    const int head_dim = call.kv.head_dim, group = queries.heads / call.kv.kv_heads;
    const int all = queries.tokens * group;
    const int tasks = (all + edgellm::ROWS_PER_TASK - 1) / edgellm::ROWS_PER_TASK;
    edgellm::parallel(call.kv.kv_heads * tasks, call.threads, [&](int index) {
        static thread_local float parts[edgellm::ROWS_PER_TASK * (edgellm::MAX_HEAD_DIM + 2)];
        AttendTask task{call.layer, index / tasks, index % tasks * edgellm::ROWS_PER_TASK, 0, 0, 0, parts};
        task.rows = std::min(edgellm::ROWS_PER_TASK, all - task.first);
        task.to = edgellm::stretches(queries.start + (task.first + task.rows - 1) / group + 1);
        attend_rows(call.kv, queries, task);
        for (int r = 0; r < task.rows; ++r) {
            const int row = task.first + r, head = task.kv_head * group + row % group;
            const float* part = parts + size_t(r) * (head_dim + 2);
            float* out = call.out + (size_t(row / group) * queries.heads + head) * head_dim;
            for (int d = 0; d < head_dim; ++d) out[d] = part[2 + d] / part[1];
        }
    });
}
