// Chunk attention over KV blocks; included by cpu.cpp once for each instruction set, with
//
//     LANES    floats in a register
//     COLUMNS  registers side by side in a tile of scores, 4 rows high: as many as there is room for
//
// A task is one KV head and a run of query rows. It walks over the key blocks once, with the online
// softmax of FlashAttention (Dao et al., arXiv:2205.14135): scores, new maximum, rescaled sums.
// int8 keys and values become floats block by block, in buffers that stay in the L1 and L2 caches;
// their scales are folded into the scores and the weights.
//
// A query's result does not depend on how many others are in the call, so a prompt gives the same
// bits however much of it was cached. Decoding has another order of sums: with `decode` set, a score
// is a dot product along the key, because turning a block around for a few rows costs more.

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t IVec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t CVec __attribute__((vector_size(LANES), aligned(1)));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }

// e^x for x <= 0, relative error below 1e-7 (Cephes' expf); 0 below -87.
inline Vec exp_negative(Vec x) {
    const IVec underflow = x < splat(-87.0f);
    x = underflow ? splat(-87.0f) : x;
    const Vec scaled = x * splat(1.44269504f) - splat(0.5f);
    const IVec n = __builtin_convertvector(scaled, IVec);  // towards zero: rounds x / ln 2
    const Vec whole = __builtin_convertvector(n, Vec);
    const Vec r = x - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
    Vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const IVec power = (n + 127) << 23;
    const Vec result = p * (Vec)power;  // the same bits
    return underflow ? Vec{} : result;
}

inline float sum_of(Vec v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// One row of K or V as floats, `padded` of them, zero past head_dim.
template <typename T>
inline void to_floats(const T* source, float* target, int head_dim, int padded) {
    int d = 0;
    if constexpr (sizeof(T) == 1) {
        for (; d + LANES <= head_dim; d += LANES) {
            const CVec codes = *reinterpret_cast<const CVec*>(source + d);
            store(target + d, __builtin_convertvector(codes, Vec));
        }
    }
    for (; d < head_dim; ++d) target[d] = static_cast<float>(source[d]);
    for (; d < padded; ++d) target[d] = 0;
}

struct Scratch {
    std::vector<float> keys, values, scores, queries, out, maximum, total;
};

// scores[row, 0..BLOCK) = queries[row] . keys, with keys transposed to [padded, BLOCK].
template <int ROWS>
inline void score_rows(const float* q, const float* keys, float* scores, int padded) {
    for (int j = 0; j < BLOCK; j += COLUMNS * LANES) {
        Vec sum[ROWS][COLUMNS] = {};
        for (int d = 0; d < padded; ++d) {
            Vec key[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) key[c] = load(keys + d * BLOCK + j + c * LANES);
            for (int r = 0; r < ROWS; ++r) {
                const Vec x = splat(q[r * padded + d]);
                for (int c = 0; c < COLUMNS; ++c) sum[r][c] += x * key[c];
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c)
                store(scores + r * BLOCK + j + c * LANES, sum[r][c]);
    }
}

// out[row, 0..padded) += weights[row, 0..count) . values [count, padded].
template <int ROWS>
inline void add_values(const float* weights, const float* values, float* out, int count,
                       int padded) {
    for (int d = 0; d < padded; d += 2 * LANES) {
        const bool two = d + LANES < padded;
        Vec sum[ROWS][2];
        for (int r = 0; r < ROWS; ++r) {
            sum[r][0] = load(out + r * padded + d);
            sum[r][1] = two ? load(out + r * padded + d + LANES) : Vec{};
        }
        for (int j = 0; j < count; ++j) {
            const Vec v0 = load(values + j * padded + d);
            const Vec v1 = two ? load(values + j * padded + d + LANES) : Vec{};
            for (int r = 0; r < ROWS; ++r) {
                const Vec w = splat(weights[r * BLOCK + j]);
                sum[r][0] += w * v0;
                sum[r][1] += w * v1;
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            store(out + r * padded + d, sum[r][0]);
            if (two) store(out + r * padded + d + LANES, sum[r][1]);
        }
    }
}

// The softmax step of one row over keys low .. high of the block: scores become weights.
inline float soften(float* scores, const float* k_scale, const float* v_scale, int low, int high,
                    float& maximum, float& total) {
    float top = maximum;
    for (int j = low; j < high; ++j) {
        if (k_scale != nullptr) scores[j] *= k_scale[j];
        top = scores[j] > top ? scores[j] : top;
    }
    const float shrink = maximum == -INFINITY ? 0.0f : exp_negative(splat(maximum - top))[0];
    for (int j = 0; j < low; ++j) scores[j] = -INFINITY;
    for (int j = high; j < BLOCK; ++j) scores[j] = -INFINITY;
    Vec sum = {};
    for (int j = 0; j < BLOCK; j += LANES) {
        const Vec weight = exp_negative(load(scores + j) - splat(top));
        sum += weight;
        store(scores + j, weight);
    }
    total = total * shrink + sum_of(sum);
    maximum = top;
    if (v_scale != nullptr)
        for (int j = low; j < high; ++j) scores[j] *= v_scale[j];
    return shrink;
}

template <typename T>
void attend_rows(const Call& call, int kv_head, int first, int rows, Scratch& s) {
    const int group = call.heads / call.kv_heads, head_dim = call.head_dim;
    const int padded = (head_dim + LANES - 1) / LANES * LANES;
    s.keys.resize(size_t(padded) * BLOCK);
    s.values.resize(size_t(BLOCK) * padded);
    s.scores.resize(size_t(rows) * BLOCK);
    s.queries.assign(size_t(rows) * padded, 0.0f);
    s.out.assign(size_t(rows) * padded, 0.0f);
    s.maximum.assign(rows, -INFINITY);
    s.total.assign(rows, 0.0f);
    // rows count through the tokens, then the heads of the group: token = row / group
    const float norm = 1.0f / std::sqrt(static_cast<float>(head_dim));
    for (int r = 0; r < rows; ++r) {
        const int token = (first + r) / group, head = kv_head * group + (first + r) % group;
        const float* q = call.q + (size_t(token) * call.heads + head) * head_dim;
        for (int d = 0; d < head_dim; ++d) s.queries[size_t(r) * padded + d] = q[d] * norm;
    }
    const int last_token = (first + rows - 1) / group, first_token = first / group;
    const int end = call.start + last_token + 1;
    const int begin = call.window > 0 ? std::max(0, call.start + first_token + 1 - call.window) : 0;
    for (int base = begin / BLOCK * BLOCK; base < end; base += BLOCK) {
        const int count = std::min(BLOCK, end - base);
        const size_t record = (size_t(call.table[base / BLOCK]) * call.layers + call.layer);
        const size_t row0 = (record * call.kv_heads + kv_head) * BLOCK;
        const T* k = static_cast<const T*>(call.k) + row0 * head_dim;
        const T* v = static_cast<const T*>(call.v) + row0 * head_dim;
        const float* k_scale = call.k_scale == nullptr ? nullptr : call.k_scale + row0;
        const float* v_scale = call.v_scale == nullptr ? nullptr : call.v_scale + row0;
        for (int j = 0; j < count; ++j)
            to_floats(v + size_t(j) * head_dim, &s.values[size_t(j) * padded], head_dim, padded);
        if (call.decode) {
            for (int j = 0; j < count; ++j) {
                float* key = &s.keys[0];
                to_floats(k + size_t(j) * head_dim, key, head_dim, padded);
                for (int r = 0; r < rows; ++r) {
                    Vec sum = {};
                    for (int d = 0; d < padded; d += LANES)
                        sum += load(&s.queries[size_t(r) * padded + d]) * load(key + d);
                    s.scores[size_t(r) * BLOCK + j] = sum_of(sum);
                }
            }
        } else {
            for (int d = 0; d < head_dim; ++d) {
                float* column = &s.keys[size_t(d) * BLOCK];
                for (int j = 0; j < count; ++j)
                    column[j] = static_cast<float>(k[size_t(j) * head_dim + d]);
                for (int j = count; j < BLOCK; ++j) column[j] = 0;
            }
            for (int d = head_dim; d < padded; ++d)
                std::fill_n(&s.keys[size_t(d) * BLOCK], BLOCK, 0.0f);
            int r = 0;
            for (; r + 4 <= rows; r += 4) {
                score_rows<4>(&s.queries[size_t(r) * padded], s.keys.data(),
                              &s.scores[size_t(r) * BLOCK], padded);
            }
            for (; r < rows; ++r) {
                score_rows<1>(&s.queries[size_t(r) * padded], s.keys.data(),
                              &s.scores[size_t(r) * BLOCK], padded);
            }
        }
        for (int r = 0; r < rows; ++r) {
            const int position = call.start + (first + r) / group;
            const int high = std::min(count, position + 1 - base);
            const int low = call.window > 0 ? std::max(0, position + 1 - call.window - base) : 0;
            if (high <= low) {
                std::fill_n(&s.scores[size_t(r) * BLOCK], BLOCK, 0.0f);
                continue;
            }
            const float shrink = soften(&s.scores[size_t(r) * BLOCK], k_scale, v_scale, low, high,
                                        s.maximum[r], s.total[r]);
            if (shrink != 1.0f)
                for (int d = 0; d < padded; ++d) s.out[size_t(r) * padded + d] *= shrink;
        }
        for (int r = 0; r < rows; r += 4) {
            const float* weights = &s.scores[size_t(r) * BLOCK];
            float* out = &s.out[size_t(r) * padded];
            switch (rows - r) {
                case 1: add_values<1>(weights, s.values.data(), out, count, padded); break;
                case 2: add_values<2>(weights, s.values.data(), out, count, padded); break;
                case 3: add_values<3>(weights, s.values.data(), out, count, padded); break;
                default: add_values<4>(weights, s.values.data(), out, count, padded);
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        const int token = (first + r) / group, head = kv_head * group + (first + r) % group;
        float* out = call.out + (size_t(token) * call.heads + head) * head_dim;
        for (int d = 0; d < head_dim; ++d) out[d] = s.out[size_t(r) * padded + d] / s.total[r];
    }
}

void attend(const Call& call) {
    const int all = call.tokens * (call.heads / call.kv_heads);
    const int parts = (all + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    edgellm::parallel(call.kv_heads * parts, call.threads, [&](int task) {
        static thread_local Scratch scratch;
        const int kv_head = task / parts, first = task % parts * ROWS_PER_TASK;
        const int rows = std::min(ROWS_PER_TASK, all - first);
        if (call.k_scale != nullptr) {
            attend_rows<int8_t>(call, kv_head, first, rows, scratch);
        } else {
            attend_rows<float>(call, kv_head, first, rows, scratch);
        }
    });
}
