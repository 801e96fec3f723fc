// Query rows against int8 blocks (see cpu.h); included once for each instruction set.

// Brings a cache line into the second-level cache. While a block is computed the next one is fetched, a
// line with each that is read.
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Query rows, or a part of each, as codes with a scale for each row.
class CodedQueries {
public:
    static size_t bytes(int width) { return edgellm::ROWS_PER_TASK * (2 * size_t(width) + 12); }

    CodedQueries(char* memory, int width) : width_(width) {
        scale_ = reinterpret_cast<float*>(memory);
        start_ = reinterpret_cast<int32_t*>(scale_ + edgellm::ROWS_PER_TASK);
        fine_start_ = start_ + edgellm::ROWS_PER_TASK;
        codes_ = reinterpret_cast<int8_t*>(fine_start_ + edgellm::ROWS_PER_TASK);
        fine_ = codes_ + edgellm::ROWS_PER_TASK * size_t(width_);
    }

    // `spread`: whether the keys went through the Hadamard transform, and so does the query.
    void set(int r, const float* q, float norm, bool spread) {
        float row[edgellm::MAX_HEAD_DIM];
        std::memcpy(row, q, sizeof(float) * width_);
        if (spread) hadamard(row, width_);
        const size_t at = size_t(r) * width_;
        const RowScale found = quantize_row(row, width_, codes_ + at);
        scale_[r] = found.scale * norm / FINE_STEPS;
        start_[r] = START * found.total;
        fine_start_[r] = START * quantize_rest(row, width_, found.scale, codes_ + at, fine_ + at);
    }

    // R rows, each number times that of `factor`, as two terms of the same 16 bits for `score4`; `shift` are the sums
    // of the numbers times those of `added`. All rows beside each other: one by one they would wait for sums
    // of lanes.
    template <int R>
    void set_scaled(const float* q, const float* factor, const float* added, float* shift) {
        float x[R][edgellm::MAX_HEAD_DIM];
        IVec largest[R] = {}, total[R] = {}, rest[R] = {};
        Vec sum[R] = {}, inverse[R];
        for (int d = 0; d < width_; d += LANES) {
            const int count = std::min(LANES, width_ - d);
            const Vec by = load_some(factor + d, count), plus = load_some(added + d, count);
            unrolled<R>([&](int r) EDGELLM_INLINED {
                const Vec value = load_some(q + size_t(r) * width_ + d, count);
                store(x[r] + d, value * by);
                largest[r] = larger(size_bits(value * by), largest[r]);
                sum[r] += value * plus;
            });
        }
        unrolled<R>([&](int r) EDGELLM_INLINED {
            const float top = finite_or_nan(max_of(largest[r]));
            shift[r] = sum_of(sum[r]);
            scale_[r] = top * (1.0f / (127 * FINE_STEPS));
            inverse[r] = splat(scale_[r] > FLT_MIN ? 1 / scale_[r] : 0);  // that of a subnormal one is infinite
        });
        for (int d = 0; d < width_; d += LANES) {
            const int count = std::min(LANES, width_ - d);
            unrolled<R>([&](int r) EDGELLM_INLINED {
                const Vec near = nearest(load(x[r] + d) * inverse[r]), least = splat(-127.0f * FINE_STEPS);
                const Vec whole = near > least ? near : least;  // a NaN, which the scale shows, would overflow sums
                const Vec coarse = nearest(whole * splat(1.0f / FINE_STEPS));
                const IVec code = __builtin_convertvector(coarse, IVec);
                const IVec fine = __builtin_convertvector(whole - coarse * splat(float(FINE_STEPS)), IVec);
                total[r] += code;
                rest[r] += fine;
                store_some(codes_ + size_t(r) * width_ + d, code, count);
                store_some(fine_ + size_t(r) * width_ + d, fine, count);
            });
        }
        unrolled<R>([&](int r) { start_[r] = -15 * (sum_of(total[r]) * FINE_STEPS + sum_of(rest[r])); });
    }

    // scores = products of R rows that `set_scaled` has rounded with `width` keys, in panels of codes c of 4 bits that
    // stand for 2 c - 15, plus `shift`. The codes are multiplied as they are.
    template <int R, bool AHEAD>
    void score4(int width, const uint8_t* panels, ptrdiff_t to_next, const float* shift, float* scores) const {
        const size_t half = width_ / 2;
        for (int j = 0; j < width; j += COLUMNS * LANES) {
            CodeSum<15> sum[R][COLUMNS], rest[R][COLUMNS];
            const uint8_t* keys = panels + edgellm::KV::key_place(j, 0, width_ / 2);
            for (size_t d = 0; d < half;) {
                const size_t end = std::min<size_t>(half, d + 4 * (CodeSum<15>::LIMIT / 2));  // each adds twice
                for (; d < end; d += 4, keys += 4 * edgellm::KEYS) {
                    Bytes low[COLUMNS], high[COLUMNS];
                    unrolled<COLUMNS>([&](int c) EDGELLM_INLINED {
                        const uint8_t* both = keys + c * LANES * half;
                        if (AHEAD) fetch(both + to_next);
                        low[c] = low_halves(load_bytes(both));
                        high[c] = high_halves(load_bytes(both));
                    });
                    unrolled<R>([&](int r) EDGELLM_INLINED {
                        const size_t at = r * size_t(width_) + d;
                        const Bytes x = splat_quad(codes_ + at), y = splat_quad(fine_ + at);
                        const Bytes x2 = splat_quad(codes_ + at + half), y2 = splat_quad(fine_ + at + half);
                        unrolled<COLUMNS>([&](int c) EDGELLM_INLINED {
                            sum[r][c].add(low[c], x);
                            sum[r][c].add(high[c], x2);
                            rest[r][c].add(low[c], y);
                            rest[r][c].add(high[c], y2);
                        });
                    });
                }
                settle(sum);
                settle(rest);
            }
            unrolled<R>([&](int r) EDGELLM_INLINED {
                unrolled<COLUMNS>([&](int c) EDGELLM_INLINED {
                    const IVec whole = 2 * (sum[r][c].sum() * FINE_STEPS + rest[r][c].sum()) + start_[r];
                    float* out = scores + r * edgellm::BLOCK + j + c * LANES;
                    store(out, to_float(whole) * splat(scale_[r]) + splat(shift[r]));
                });
            });
        }
    }

    // scores (+)= products of R rows with `width` keys, in panels; `ahead` is what will be read next.
    template <int R, bool AHEAD, bool ADD>
    void score(int first, int width, const int8_t* panels, const float* k_scale, const int8_t* ahead,
               float* scores) const {
        const int8_t *codes = codes_ + size_t(first) * width_, *fine = fine_ + size_t(first) * width_;
        const size_t head_dim = width_;
        for (int j = 0; j < width; j += COLUMNS * LANES) {
            IVec sum[R][COLUMNS], rest[R][COLUMNS];
            unrolled<R>([&](int r) {
                unrolled<COLUMNS>([&](int c) {
                    sum[r][c] = splat_int(start_[first + r]);
                    rest[r][c] = splat_int(fine_start_[first + r]);
                });
            });
            const int8_t* keys = panels + edgellm::KV::key_place(j, 0, width_);
            constexpr int READ = 4 * LANES * COLUMNS;
            static_assert(COLUMNS == 1 || LANES == edgellm::KEYS, "a column is a panel of keys");
            for (size_t d = 0; d < head_dim; d += 4, keys += 4 * edgellm::KEYS, ahead += READ) {
                Bytes key[COLUMNS];
                unrolled<COLUMNS>([&](int c) {
                    if (AHEAD) fetch(ahead + 4 * LANES * c);
                    key[c] = operand(load_bytes(keys + c * LANES * head_dim));
                });
                unrolled<R>([&](int r) {
                    const size_t at = r * head_dim + d;
                    const Bytes x = splat_quad(codes + at), y = splat_quad(fine + at);
                    unrolled<COLUMNS>([&](int c) {
                        sum[r][c] = dot_signed(sum[r][c], key[c], x);
                        rest[r][c] = dot_signed(rest[r][c], key[c], y);
                    });
                });
            }
            unrolled<R>([&](int r) {
                unrolled<COLUMNS>([&](int c) {
                    const int at = j + c * LANES;
                    const Vec whole = to_float(sum[r][c] * FINE_STEPS + rest[r][c]);
                    const Vec score = whole * (load(k_scale + at) * splat(scale_[first + r]));
                    float* out = scores + r * edgellm::BLOCK + at;
                    store(out, ADD ? load(out) + score : score);
                });
            });
        }
    }

private:
    const int width_;
    float* scale_;
    int32_t *start_, *fine_start_;
    int8_t *codes_, *fine_;
};

// Keys went through the Hadamard transform, and so do the queries. Latents are values, turned around block by block
// to be keys as well.
class Int8Rows {
public:
    static size_t bytes(const edgellm::KV& kv) {
        return CodedQueries::bytes(kv.head_dim) + CodedQueries::bytes(kv.latent) + 2 * TILE * edgellm::BLOCK +
               edgellm::BLOCK * (size_t(kv.latent) + kv.head_dim + kv.value_dim() + 2 * sizeof(float));
    }

    Int8Rows(const edgellm::KV& kv, char* memory)
        : kv_(kv), head_dim_(kv.head_dim), value_dim_(kv.value_dim()), queries_(memory, kv.head_dim),
          latent_queries_(memory + CodedQueries::bytes(kv.head_dim), kv.latent) {
        high_ = reinterpret_cast<int8_t*>(memory) + CodedQueries::bytes(kv.head_dim) + CodedQueries::bytes(kv.latent);
        low_ = high_ + TILE * edgellm::BLOCK;
        scales_ = reinterpret_cast<float*>(low_ + TILE * edgellm::BLOCK);
        latents_ = reinterpret_cast<int8_t*>(scales_ + 2 * edgellm::BLOCK);
        gathered_ = latents_ + edgellm::BLOCK * size_t(kv.latent);
    }

    void set_query(int r, const float* q, float norm) {
        queries_.set(r, q, norm, true);
        if (kv_.latent) latent_queries_.set(r, q + head_dim_, norm, false);
    }

    // A block, and the one that will follow.
    void open(const edgellm::BlockPlace& here, const edgellm::BlockPlace& next, int count) {
        k_ = static_cast<const int8_t*>(kv_.k) + here.row * head_dim_;
        v_ = static_cast<const int8_t*>(kv_.v) + here.row * value_dim_;
        k_scale_ = kv_.k_scale + here.row;
        v_scale_ = kv_.v_scale + here.row;
        const ptrdiff_t rows = rows_between(here, next);
        k_to_next_ = rows * head_dim_;
        v_to_next_ = rows * value_dim_;
        if (kv_.latent) turn_latents(count);
    }

    // Panels of any blocks, which are copied beside each other: 16 KB for heads of 64 numbers, for all rows of a task.
    void gather(const int32_t* panels, int layer, int kv_head) {
        int8_t *k = gathered_, *v = gathered_ + edgellm::BLOCK * size_t(head_dim_);
        const auto copy = [](auto* to, const void* from, size_t row, int i, size_t width) {
            const size_t bytes = edgellm::KEYS * width * sizeof(*to);
            const char* first = static_cast<const char*>(from) + row * width * sizeof(*to);
            std::memcpy(reinterpret_cast<char*>(to) + i * bytes, first, bytes);
        };
        for (int i = 0; i < edgellm::PANELS; ++i) {
            const size_t row = kv_.first_row(panels[i] * edgellm::KEYS, layer, kv_head) +
                               panels[i] % edgellm::PANELS * edgellm::KEYS;
            copy(k, kv_.k, row, i, head_dim_);
            copy(v, kv_.v, row, i, value_dim_);
            copy(scales_, kv_.k_scale, row, i, 1);
            copy(scales_ + edgellm::BLOCK, kv_.v_scale, row, i, 1);
        }
        k_ = k;
        v_ = v;
        k_scale_ = scales_;
        v_scale_ = scales_ + edgellm::BLOCK;
        k_to_next_ = v_to_next_ = 0;
    }

    template <int R, bool AHEAD>
    void score(int first, int width, float* scores) {
        queries_.score<R, AHEAD, false>(first, width, k_, k_scale_, k_ + k_to_next_, scores);
        if (kv_.latent) latent_queries_.score<R, false, true>(first, width, latents_, v_scale_, latents_, scores);
    }

    template <int R, bool AHEAD>
    void add(TileState& tile, int count, int width) {
        float w_scale[R];
        split_weights<R>(tile.scores, v_scale_, width, w_scale);
        const int quads = (count + 3) / 4, step = padded(value_dim_);
        constexpr int WIDE = LANES == 16 && R < 4 ? 4 : 2;  // as many as there are registers for
        int d = 0;
        for (; d + WIDE * LANES <= value_dim_; d += WIDE * LANES)
            add_columns<R, WIDE, false, AHEAD>(tile, d, quads, step, w_scale);
        for (; d + LANES <= value_dim_; d += LANES)
            add_columns<R, 1, false, AHEAD>(tile, d, quads, step, w_scale);
        if (d < value_dim_) add_columns<R, 1, true, AHEAD>(tile, d, quads, step, w_scale);
    }

protected:
    // Weights times `v_scale`, as two terms of 7 bits; `w_scale` is what the lower one counts.
    template <int R>
    void split_weights(const float* weights, const float* v_scale, int width, float* w_scale) {
        const auto scaled_at = [&](int r, int j, Vec scale) EDGELLM_INLINED {
            const Vec p = load(weights + r * edgellm::BLOCK + j);
            return p > Vec{} ? p * scale : Vec{};  // no row: no scale either
        };
        int8_t *high = high_, *low = low_;
        Vec most[R], broken[R];
        unrolled<R>([&](int r) { most[r] = broken[r] = Vec{}; });
        for (int j = 0; j < width; j += LANES) {
            const Vec scale = load(v_scale + j);
            unrolled<R>([&](int r) EDGELLM_INLINED {
                const Vec w = scaled_at(r, j, scale);
                most[r] = larger(w, most[r]);
                broken[r] += w * splat(0.0f);
            });
        }
        float inverse[R];
        unrolled<R>([&](int r) {
            const float top = max_of(most[r]);
            inverse[r] = top > 0 ? 16383.0f / top : 0.0f;
            w_scale[r] = top * (1.0f / 16383) + sum_of(broken[r]);
        });
        for (int j = 0; j < width; j += LANES) {
            const Vec scale = load(v_scale + j);
            unrolled<R>([&](int r) EDGELLM_INLINED {
                const int at = r * edgellm::BLOCK + j;
                const Vec scaled = scaled_at(r, j, scale) * splat(inverse[r]) + splat(0.5f);
                const IVec code = __builtin_convertvector(scaled, IVec) & 16383;
                store_narrow(high + at, code >> 7);
                store_narrow(low + at, code & 127);
            });
        }
    }

private:
    template <int R, int C, bool PART, bool AHEAD>
    void add_columns(TileState& tile, int d, int quads, int step, const float* w_scale) {
        IVec high[R][C] = {}, low[R][C] = {};
        const int8_t *from = v_ + 4 * d, *high_codes = high_, *low_codes = low_;
        for (int quad = 0; quad < quads; ++quad, from += 4 * value_dim_, high_codes += 4, low_codes += 4) {
            Bytes value[C];
            unrolled<C>([&](int c) {
                if (AHEAD) fetch(from + 4 * c * LANES + v_to_next_);
                if (PART) {
                    value[c] = Bytes{};
                    std::memcpy(&value[c], from, 4 * (value_dim_ - d));
                } else {
                    value[c] = load_bytes(from + 4 * c * LANES);
                }
            });
            unrolled<R>([&](int r) {
                const Bytes x = splat_quad(high_codes + r * edgellm::BLOCK);
                const Bytes y = splat_quad(low_codes + r * edgellm::BLOCK);
                unrolled<C>([&](int c) {
                    high[r][c] = dot(high[r][c], x, value[c]);
                    low[r][c] = dot(low[r][c], y, value[c]);
                });
            });
        }
        unrolled<R>([&](int r) {
            unrolled<C>([&](int c) {
                float* out = tile.values + size_t(r) * step + d + c * LANES;
                const Vec sum = to_float((high[r][c] << 7) + low[r][c]);
                store(out, load(out) * splat(tile.shrink[r]) + sum * splat(w_scale[r]));
            });
        });
    }

protected:
    // From a block to the next one; 0 where that is in another pool.
    static ptrdiff_t rows_between(const edgellm::BlockPlace& here, const edgellm::BlockPlace& next) {
        return here.sealed == next.sealed ? ptrdiff_t(next.row) - ptrdiff_t(here.row) : 0;
    }

    const edgellm::KV& kv_;
    const int head_dim_, value_dim_;
    const int8_t *k_ = nullptr, *v_ = nullptr;
    ptrdiff_t k_to_next_ = 0, v_to_next_ = 0;  // bytes from a block's keys, or values, to those of the next one
    const float *k_scale_ = nullptr, *v_scale_ = nullptr;

    int8_t *high_, *low_;  // weights of a tile

private:
    // Quads of values of 4 tokens become quads of 4 numbers of a key.
    void turn_latents(int count) {
        for (int row = 0; row < count; row += 4) {
            const int8_t* from = v_ + size_t(row) * value_dim_;
            for (int d = 0; d < value_dim_; d += 4, from += 16) {
                int8_t* to = latents_ + edgellm::KV::key_place(row, d, value_dim_);
                for (int j = 0; j < 4; ++j)
                    for (int i = 0; i < 4; ++i) to[4 * j + i] = from[4 * i + j];
            }
        }
    }

    CodedQueries queries_, latent_queries_;
    float* scales_;  // of gathered panels
    int8_t *latents_, *gathered_;
};
