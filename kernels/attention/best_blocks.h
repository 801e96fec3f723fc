// The sealed blocks that matter most to a row, found as Quest does (Tang et al., arXiv:2406.10774), but not by the
// bounds of their keys; included once for each instruction set.
//
// A block of 128 keys has nearly the same bounds as the next one: of 18 heads of SmolLM2-135M that look for a passkey in
// 4,000 tokens, bounds led 11 to its block among the best five, and its scores over a quarter of the channels all 18.

// Quads of bytes of a key, each of which has 8 channels, that are looked at: those in which queries and ranges of
// channels are largest.
struct Quads {
    int count;
    int32_t numbers[edgellm::MAX_HEAD_DIM / 32];
};

inline Quads largest_quads(const float* q, int heads, const float* half, int width) {
    const int all = width / 8;
    float size[edgellm::MAX_HEAD_DIM / 8] = {};
    for (int h = 0; h < heads; ++h) {
        float of_head[edgellm::MAX_HEAD_DIM / 8] = {};
        for (int d = 0; d < width; ++d) {
            const float part = q[size_t(h) * width + d] * half[d];
            of_head[d % (width / 2) / 4] += part * part;
        }
        for (int i = 0; i < all; ++i) size[i] = std::max(size[i], of_head[i]);
    }
    Quads quads{(all + 3) / 4, {}};
    for (int n = 0; n < quads.count; ++n) {
        int best = 0;
        for (int i = 1; i < all; ++i)
            if (size[i] > size[best]) best = i;
        quads.numbers[n] = best;
        size[best] = -1;
    }
    return quads;
}

// The largest score of each of R queries with the keys of a block, whose other channels count as their middles; the
// largest of all. `near` [R, 8 quads] are the queries' numbers in the channels that are looked at, quad after quad.
template <int R>
inline float likely_score(const float* q, const float* near, const float* half, const uint8_t* keys, int width,
                          const Quads& quads) {
    constexpr int MOST = edgellm::MAX_HEAD_DIM / 4 + LANES;
    const int looked = 8 * quads.count;
    float ranges[MOST];
    for (int n = 0; n < quads.count; ++n) {
        std::memcpy(ranges + 8 * n, half + 4 * quads.numbers[n], 16);
        std::memcpy(ranges + 8 * n + 4, half + 4 * quads.numbers[n] + width / 2, 16);
    }
    int8_t codes[R][MOST];
    float shift[R], unit[R];
    int total[R];
    Vec sum[R] = {};
    for (int d = 0; d < width; d += LANES) {
        const int count = std::min(LANES, width - d);
        const Vec middle = load_some(half + width + d, count);
        unrolled<R>([&](int r) EDGELLM_INLINED { sum[r] += load_some(q + size_t(r) * width + d, count) * middle; });
    }
    unrolled<R>([&](int r) EDGELLM_INLINED {
        float factors[MOST];
        IVec largest = {}, codes_sum = {};
        for (int i = 0; i < looked; i += LANES) {
            const int count = std::min(LANES, looked - i);
            const Vec factor = load_some(near + r * looked + i, count) * load_some(ranges + i, count);
            largest = larger(size_bits(factor), largest);
            store(factors + i, factor);
        }
        const float top = finite_or_nan(max_of(largest));
        const bool there = top > 1e-30f;  // not so of a broken query, which the first block shows
        unit[r] = there ? top / 127 : 0;
        const Vec inverse = splat(there ? 127 / top : 0), none = {};
        for (int i = 0; i < looked; i += LANES) {
            const Vec x = nearest(load(factors + i) * inverse);
            const IVec code = __builtin_convertvector(there ? x : none, IVec);
            store_narrow(codes[r] + i, code);
            codes_sum += code;
        }
        total[r] = sum_of(codes_sum);
        shift[r] = sum_of(sum[r]);
    });
    IVec most[R];
    unrolled<R>([&](int r) { most[r] = splat_int(INT32_MIN); });
    for (int j = 0; j < edgellm::BLOCK; j += LANES) {
        const uint8_t* panel = keys + edgellm::KV::key_place(j, 0, width / 2);
        IVec score[R] = {};
        for (int n = 0; n < quads.count; ++n) {
            const Bytes both = load_bytes(panel + 4 * edgellm::KEYS * quads.numbers[n]);
            const Bytes low = low_halves(both), high = high_halves(both);
            unrolled<R>([&](int r) EDGELLM_INLINED {
                score[r] = dot(score[r], low, splat_quad(codes[r] + 8 * n));
                score[r] = dot(score[r], high, splat_quad(codes[r] + 8 * n + 4));
            });
        }
        unrolled<R>([&](int r) { most[r] = larger(score[r], most[r]); });
    }
    float result = -INFINITY;
    unrolled<R>([&](int r) {
        result = std::max(result, shift[r] + static_cast<float>(2 * max_of(most[r]) - 15 * total[r]) * unit[r]);
    });
    return result;
}

// The `best` ones of some sealed blocks, with the largest likely scores of any of the heads that share a KV head, for
// the first token of a task. Their numbers go to `chosen`, in order.
inline void best_blocks(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task,
                        const edgellm::BlockList& among, int best, int32_t* chosen) {
    struct Scored {
        float score;
        int32_t block;
    };
    const int group = queries.heads / kv.kv_heads, width = kv.head_dim, token = task.first / group;
    const int end = edgellm::KV::sealed_end(queries.start + token + 1);
    const float* q = queries.q + (size_t(token) * queries.heads + size_t(task.kv_head) * group) * width;
    const auto row_of = [&](int block) { return kv.first_row_in(kv.sealed.table[block], task.layer, task.kv_head); };
    const auto half_of = [&](size_t row) { return kv.sealed.k_scale + row / edgellm::BLOCK * 2 * width; };
    float half[2 * edgellm::MAX_HEAD_DIM];
    const auto keys_of = [&](size_t row) { return static_cast<const uint8_t*>(kv.sealed.k) + row * width / 2; };
    widen(half_of(row_of(end - 1)), 2 * width, half);
    const Quads quads = largest_quads(q, group, half, width);
    const int looked = 8 * quads.count;
    const size_t bytes = sizeof(Scored) * size_t(among.count) + 4 * size_t(group) * looked;
    Scored* scored = static_cast<Scored*>(edgellm::scratch(bytes));
    float* near = reinterpret_cast<float*>(scored + among.count);
    for (int h = 0; h < group; ++h)
        for (int i = 0; i < looked; ++i)
            near[h * looked + i] = q[h * width + 4 * quads.numbers[i / 8] + i % 4 + i / 4 % 2 * (width / 2)];
    for (int i = 0; i < among.count; ++i) {
        const size_t row = row_of(among[i]), ahead = row_of(among[std::min(i + 1, among.count - 1)]);
        for (int d = 0; d < 2 * width; d += 32) fetch(half_of(ahead) + d);
        for (int j = 0; j < edgellm::BLOCK; j += edgellm::KEYS)
            for (int n = 0; n < quads.count; ++n)
                fetch(keys_of(ahead) + edgellm::KV::key_place(j, 4 * quads.numbers[n], width / 2));
        widen(half_of(row), 2 * width, half);
        float most = -INFINITY;
        const auto look = [&](auto rows, int h) {
            const float score = likely_score<decltype(rows)::value>(q + size_t(h) * width, near + size_t(h) * looked,
                                                                     half, keys_of(row), width, quads);
            most = std::max(most, score);
        };
        int h = 0;
        for (; h + 4 <= group; h += 4) look(std::integral_constant<int, 4>{}, h);
        for (; h + 2 <= group; h += 2) look(std::integral_constant<int, 2>{}, h);
        if (h < group) look(std::integral_constant<int, 1>{}, h);
        scored[i] = {most, among[i]};
    }
    std::nth_element(scored, scored + best, scored + among.count, [](const Scored& a, const Scored& b) {
        return a.score > b.score || (a.score == b.score && a.block > b.block);
    });
    std::sort(scored, scored + best, [](const Scored& a, const Scored& b) { return a.block < b.block; });
    for (int i = 0; i < best; ++i) chosen[i] = scored[i].block;
}

// Blocks that the first token of a task reads, for all heads that share a KV head: the first one, the last two, and the
// best ones of some sealed blocks.
inline edgellm::BlockList choose_blocks(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task,
                                        const edgellm::BlockList& among, int32_t* chosen) {
    const int position = queries.start + task.first / (queries.heads / kv.kv_heads), own = position / edgellm::BLOCK;
    const int count = edgellm::blocks_read(position, queries.kv_read);
    if (own < count) {
        for (int i = 0; i < count; ++i) chosen[i] = i;
        return {chosen, count, 0, 0, nullptr};
    }
    best_blocks(kv, queries, task, among, count - 3, chosen + 1);
    chosen[0] = 0;
    chosen[count - 2] = own - 1;
    chosen[count - 1] = own;
    return {chosen, count, 0, 0, nullptr};
}
