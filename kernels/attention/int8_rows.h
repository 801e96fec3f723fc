// Query rows against int8 and int4 blocks (see cpu.h); included once for each instruction set.

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

protected:
    const edgellm::KV& kv_;
    const int head_dim_;
    const int8_t *k_ = nullptr, *v_ = nullptr;
    Ahead ahead_;
    const float *k_scale_ = nullptr, *v_scale_ = nullptr;

private:
    float* scale_;
    int32_t *start_, *fine_start_;
    int8_t *codes_, *fine_, *high_, *low_;
};

// Blocks of 4 bits are made 8 one by one. Their K and V went through a Hadamard transform, and so do
// the queries; whoever ends a row transforms it back.
class Int4Rows : public Int8Rows {
public:
    static size_t bytes(int head_dim) {
        return 64 + Int8Rows::bytes(head_dim) + 2 * edgellm::BLOCK * size_t(head_dim);
    }

    Int4Rows(const edgellm::KV& kv, char* memory) : Int8Rows(kv, memory) {
        keys_ = reinterpret_cast<int8_t*>(memory + (Int8Rows::bytes(head_dim_) + 63) / 64 * 64);
        values_ = keys_ + edgellm::BLOCK * size_t(head_dim_);
    }

    void set_query(int r, const float* q, float norm) {
        float spread[edgellm::MAX_HEAD_DIM];
        std::memcpy(spread, q, sizeof(float) * head_dim_);
        hadamard(spread, head_dim_);
        Int8Rows::set_query(r, spread, norm);
    }

    void open(size_t first_row, size_t next_row, int count) {
        const uint8_t* k = static_cast<const uint8_t*>(kv_.k) + first_row * head_dim_ / 2;
        const uint8_t* v = static_cast<const uint8_t*>(kv_.v) + first_row * head_dim_ / 2;
        const int panel = edgellm::KEYS * head_dim_, quad = 4 * head_dim_;
        for (int j = 0; j < count; j += edgellm::KEYS, k += panel / 2)
            unpack_codes4(k, panel / 2, keys_ + size_t(j) * head_dim_);
        for (int j = 0; j < count; j += 4, v += quad / 2)
            unpack_codes4(v, quad / 2, values_ + size_t(j) * head_dim_);
        k_ = keys_;
        v_ = values_;
        k_scale_ = kv_.k_scale + first_row;
        v_scale_ = kv_.v_scale + first_row;
        ahead_ = Ahead(static_cast<const int8_t*>(kv_.k) + next_row * head_dim_ / 2,
                       static_cast<const int8_t*>(kv_.v) + next_row * head_dim_ / 2, head_dim_);
    }

private:
    int8_t *keys_, *values_;
};
