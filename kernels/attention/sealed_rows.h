// Query rows against int8 rows and sealed blocks (see cpu.h); included once for each instruction set.

// Blocks of int8 rows, whose values went through the Hadamard transform as well, and sealed ones. Codes of 2 and 4 bits
// are multiplied as they are, and what they stand for, 2 c - top, is made of the sums.
template <int KEY_BITS, int VALUE_BITS>
class SealedRows : public Int8Rows {
    static constexpr bool BY_CHANNEL = KEY_BITS < 8;
    static constexpr int SCALES = edgellm::value_scales(VALUE_BITS);
    // Numbers of a byte of values that have the same scale.
    static constexpr int PARTS = 8 / VALUE_BITS, TOGETHER = PARTS / SCALES, TOP = (1 << VALUE_BITS) - 1;
    static_assert(KEY_BITS == 8 || KEY_BITS == 4, "what score4 takes");

public:
    static size_t bytes(const edgellm::KV& kv) {
        const size_t rows = edgellm::ROWS_PER_TASK * size_t(kv.head_dim);
        const size_t scales = 2 * size_t(kv.head_dim) + (1 + SCALES) * edgellm::BLOCK;
        return 64 + Int8Rows::bytes(kv) + CodedQueries::bytes(kv.head_dim) + 4 * (rows + scales);
    }

    SealedRows(const edgellm::KV& kv, char* memory)
        : Int8Rows(kv, memory), tile_(memory + (Int8Rows::bytes(kv) + 63) / 64 * 64, head_dim_) {
        const size_t before = (Int8Rows::bytes(kv) + 63) / 64 * 64 + CodedQueries::bytes(head_dim_);
        plain_ = reinterpret_cast<float*>(memory + before);
        value_scale_ = plain_ + edgellm::ROWS_PER_TASK * size_t(head_dim_);
        key_scale_ = value_scale_ + SCALES * edgellm::BLOCK;
    }

    void set_query(int r, const float* q, float norm) {
        Int8Rows::set_query(r, q, norm);
        if (BY_CHANNEL)
            for (int d = 0; d < head_dim_; ++d) plain_[size_t(r) * head_dim_ + d] = q[d] * norm;
    }

    void open(const edgellm::BlockPlace& here, const edgellm::BlockPlace& next, int count) {
        sealed_ = here.sealed;
        if (!sealed_) return Int8Rows::open(here, next, count);
        const edgellm::Sealed& sealed = kv_.sealed;
        const ptrdiff_t to_next = rows_between(here, next) * head_dim_;
        const size_t at = here.row * head_dim_;
        values_ = static_cast<const uint8_t*>(sealed.v) + at * VALUE_BITS / 8;
        values_to_next_ = to_next * VALUE_BITS / 8;
        widen(sealed.v_scale + here.row * SCALES, SCALES * edgellm::BLOCK, value_scale_);
        k_ = static_cast<const int8_t*>(sealed.k) + at * KEY_BITS / 8;
        k_to_next_ = to_next * KEY_BITS / 8;
        k_scale_ = key_scale_;
        if (BY_CHANNEL)
            widen(sealed.k_scale + here.row / edgellm::BLOCK * 2 * head_dim_, 2 * head_dim_, key_scale_);
        else
            widen(sealed.k_scale + here.row, edgellm::BLOCK, key_scale_);
    }

    // A channel's scale goes into the queries, which are rounded anew for each block:
    // q . k = sum of (q half) code, and of q mid.
    template <int R, bool AHEAD>
    void score(int first, int width, float* scores) {
        if (!sealed_ || !BY_CHANNEL) return Int8Rows::score<R, AHEAD>(first, width, scores);
        float shift[R];
        tile_.set_scaled<R>(plain_ + size_t(first) * head_dim_, key_scale_, key_scale_ + head_dim_, shift);
        tile_.score4<R, AHEAD>(width, reinterpret_cast<const uint8_t*>(k_), k_to_next_, shift, scores);
    }

    template <int R, bool AHEAD>
    void add(TileState& tile, int count, int width) {
        if (!sealed_) return Int8Rows::add<R, AHEAD>(tile, count, width);
        add_scaled<R, AHEAD, 0>(tile, width);
        if constexpr (SCALES == 2) add_scaled<R, false, 1>(tile, width);
    }

private:
    // The numbers that scale number SCALE belongs to.
    template <int R, bool AHEAD, int SCALE>
    void add_scaled(TileState& tile, int width) {
        float w_scale[R];
        int32_t start[R];
        split_weights<R>(tile.scores, value_scale_ + SCALE * edgellm::BLOCK, width, w_scale);
        unrolled<R>([&](int r) EDGELLM_INLINED {
            IVec high = {}, low = {};
            for (int j = 0; j < edgellm::BLOCK; j += 4 * LANES) {
                high = dot(high, load_bytes(high_ + r * edgellm::BLOCK + j), Bytes{} + int8_t(1));
                low = dot(low, load_bytes(low_ + r * edgellm::BLOCK + j), Bytes{} + int8_t(1));
            }
            start[r] = -TOP * ((sum_of(high) << 7) + sum_of(low));
        });
        constexpr int WIDE = LANES == 16 && R < 4 ? 2 : 1;  // as many as there are registers for
        const int columns = head_dim_ / PARTS;
        int d = 0;
        for (; d + WIDE * LANES <= columns; d += WIDE * LANES)
            add_packed<R, WIDE, false, AHEAD, SCALE>(tile, d, w_scale, start);
        for (; d + LANES <= columns; d += LANES) add_packed<R, 1, false, AHEAD, SCALE>(tile, d, w_scale, start);
        if (d < columns) add_packed<R, 1, true, AHEAD, SCALE>(tile, d, w_scale, start);
    }

    // Columns of bytes from d on.
    template <int R, int C, bool PART, bool AHEAD, int SCALE>
    void add_packed(TileState& tile, int d, const float* w_scale, const int32_t* start) {
        constexpr int N = TOGETHER * C;
        const int columns = head_dim_ / PARTS, step = padded(head_dim_), count = PART ? columns - d : LANES;
        CodeSum<TOP> high[R][N], low[R][N];
        const uint8_t* from = values_ + 4 * d;
        constexpr int QUADS = edgellm::BLOCK / 4, TURN = std::min(QUADS, CodeSum<TOP>::LIMIT);
        static_assert(QUADS % TURN == 0, "sums settle after as many quads each time");
        for (int quad = 0; quad < QUADS;) {
            for (const int end = quad + TURN; quad < end; ++quad, from += 4 * columns) {
                Bytes value[N];
                unrolled<C>([&](int c) EDGELLM_INLINED {
                    if (AHEAD) fetch(from + 4 * c * LANES + values_to_next_);
                    Bytes all = {};
                    if (PART)
                        std::memcpy(&all, from, 4 * size_t(count));
                    else
                        all = load_bytes(from + 4 * c * LANES);
                    static_assert(TOGETHER == 2, "two numbers of a byte at a time");
                    value[2 * c] = bits_of<VALUE_BITS, 2 * SCALE * VALUE_BITS>(all);
                    value[2 * c + 1] = bits_of<VALUE_BITS, (2 * SCALE + 1) * VALUE_BITS>(all);
                });
                unrolled<R>([&](int r) EDGELLM_INLINED {
                    const Bytes x = splat_quad(high_ + r * edgellm::BLOCK + 4 * quad);
                    const Bytes y = splat_quad(low_ + r * edgellm::BLOCK + 4 * quad);
                    unrolled<N>([&](int c) EDGELLM_INLINED {
                        high[r][c].add(value[c], x);
                        low[r][c].add(value[c], y);
                    });
                });
            }
            settle(high);
            settle(low);
        }
        unrolled<R>([&](int r) EDGELLM_INLINED {
            unrolled<N>([&](int c) EDGELLM_INLINED {
                float* out = tile.values + size_t(r) * step + d + (2 * SCALE + c % 2) * columns + c / 2 * LANES;
                const Vec sum = to_float(2 * ((high[r][c].sum() << 7) + low[r][c].sum()) + start[r]);
                const Vec all = load_some(out, count) * splat(tile.shrink[r]) + sum * splat(w_scale[r]);
                if (PART)
                    std::memcpy(out, &all, 4 * size_t(count));
                else
                    store(out, all);
            });
        });
    }

    CodedQueries tile_;  // of the rows of a tile, for a block
    float* plain_;
    float *key_scale_, *value_scale_;  // of the sealed block; keys by channel: half a range of each, then the middles
    const uint8_t* values_ = nullptr;
    ptrdiff_t values_to_next_ = 0;  // bytes from a block's packed values to those of the next one
    bool sealed_ = false;
};
