// The blocks of keys that take most of the attention of a whole block of query positions, found as XAttention does (Xu et
// al., arXiv:2503.16428); included once for each instruction set.
//
// A panel has 16 keys. Its antidiagonal with 16 queries, the last query with the first key and so on, is one product of
// 16 * head_dim codes, and meets each key and each query once: verticals and slashes of the attention cross it. A softmax
// over a head's antidiagonals gives the mass of each block, for 1/64 of the products that attention takes.

constexpr int TILES = edgellm::BLOCK / edgellm::KEYS;  // of queries, or keys, of a block

// Queries of a head in a block of positions, 8 bits each, in panels as keys are; the last query of a tile comes first.
struct Antidiagonals {
    int8_t* codes;   // [TILES, width / 4, KEYS, 4]
    int32_t* start;  // [TILES, KEYS], what sums begin with
    float* scale;    // [TILES, KEYS]

    static size_t bytes(int width) { return edgellm::BLOCK * (size_t(width) + 8); }

    Antidiagonals(char* memory, int width)
        : codes(reinterpret_cast<int8_t*>(memory)),
          start(reinterpret_cast<int32_t*>(memory + edgellm::BLOCK * size_t(width))),
          scale(reinterpret_cast<float*>(start + edgellm::BLOCK)) {}

    // `q` are the queries of consecutive tokens, `step` numbers apart.
    void set(const float* q, size_t step, int width, float norm) {
        float row[edgellm::MAX_HEAD_DIM];
        int8_t found[edgellm::MAX_HEAD_DIM];
        for (int r = 0; r < edgellm::BLOCK; ++r) {
            std::memcpy(row, q + r * step, sizeof(float) * width);
            hadamard(row, width);
            const RowScale rounded = quantize_row(row, width, found);
            const int at = r / edgellm::KEYS * edgellm::KEYS + edgellm::KEYS - 1 - r % edgellm::KEYS;
            start[at] = START * rounded.total;
            scale[at] = rounded.scale * norm / edgellm::KEYS;
            for (int d = 0; d < width; d += 4) std::memcpy(codes + edgellm::KV::key_place(at, d, width), found + d, 4);
        }
    }

    // The scores of all tiles with the keys of a panel, `step` numbers apart.
    void score(const int8_t* keys, const float* k_scale, int width, float* scores, size_t step) const {
        Vec sum[TILES] = {};
        const size_t tile = size_t(edgellm::KEYS) * width;
        for (int lane = 0; lane < edgellm::KEYS; lane += LANES) {
            IVec whole[TILES];
            unrolled<TILES>([&](int i) EDGELLM_INLINED {
                std::memcpy(&whole[i], start + i * edgellm::KEYS + lane, sizeof(IVec));
            });
            for (size_t at = 4 * lane; at < tile; at += 4 * edgellm::KEYS) {
                const Bytes key = operand(load_bytes(keys + at));
                unrolled<TILES>([&](int i) EDGELLM_INLINED {
                    whole[i] = dot_signed(whole[i], key, load_bytes(codes + i * tile + at));
                });
            }
            const Vec of_keys = load(k_scale + lane);
            unrolled<TILES>([&](int i) EDGELLM_INLINED {
                sum[i] += to_float(whole[i]) * (load(scale + i * edgellm::KEYS + lane) * of_keys);
            });
        }
        unrolled<TILES>([&](int i) EDGELLM_INLINED { scores[i * step] = sum_of(sum[i]); });
    }
};

// Adds the softmax of a tile of queries over `count` antidiagonals to the mass of their blocks; one with a NaN has none.
inline void add_mass(float* scores, int count, float* mass) {
    const int end = (count + LANES - 1) / LANES * LANES;
    std::fill(scores + count, scores + end, -INFINITY);
    Vec most = splat(-INFINITY), sum = {};
    for (int j = 0; j < end; j += LANES) most = larger(load(scores + j), most);
    const Vec top = splat(max_of(most));
    for (int j = 0; j < end; j += LANES) {
        const Vec weight = exp_negative(load(scores + j) - top);
        store(scores + j, weight);
        sum += weight;
    }
    const float total = sum_of(sum);
    if (!(total > 0 && total < INFINITY)) return;
    for (int j = 0; j < count; ++j) mass[j / TILES] += scores[j] / total;
}

// Marks the blocks that a head reads of those up to `own`: the first one, its own, the one before, and the fewest others
// with which they have `share` of its mass. `order` has room for all of them.
inline void take_heaviest(const float* mass, int own, float share, int32_t* order, uint8_t* taken) {
    float held = 0, all = 0;
    int32_t* end = order;
    for (int b = 0; b <= own; ++b) {
        all += mass[b];
        if (b > 0 && b + 1 < own) {
            *end++ = b;
            continue;
        }
        held += mass[b];
        taken[b] = 1;
    }
    if (all == 0) std::fill(taken, taken + own + 1, 1);  // a NaN in a key, which shows so
    std::sort(order, end,
              [&](int32_t a, int32_t b) { return mass[a] > mass[b] || (mass[a] == mass[b] && a > b); });
    for (const int32_t* b = order; b < end && held < share * all; ++b) {
        held += mass[*b];
        taken[*b] = 1;
    }
}

// The blocks that a block of query positions reads for all heads of a KV head: what any of these takes. Their number and
// then their numbers, in order, go to `chosen`.
inline void choose_heavy(const edgellm::KV& kv, const edgellm::Queries& queries, int layer, int kv_head, int own,
                         int32_t* chosen) {
    const int group = queries.heads / kv.kv_heads, width = kv.head_dim, blocks = own + 1;
    const size_t first_query = size_t(own * edgellm::BLOCK - queries.start) * queries.heads;
    const size_t step = size_t(blocks) * TILES + LANES, coded = (Antidiagonals::bytes(width) + 63) / 64 * 64;
    char* memory = static_cast<char*>(edgellm::scratch(coded + 4 * (TILES * step + blocks) + blocks));
    Antidiagonals rows(memory, width);
    float* scores = reinterpret_cast<float*>(memory + coded);
    float* mass = scores + TILES * step;
    auto* taken = reinterpret_cast<uint8_t*>(mass + blocks);
    std::fill(taken, taken + blocks, queries.mass >= 1);
    for (int h = 0; h < group && queries.mass < 1; ++h) {
        const float* q = queries.q + (first_query + kv_head * group + h) * width;
        rows.set(q, size_t(queries.heads) * width, width, queries.scale);
        for (int b = 0; b < blocks; ++b) {
            const size_t first = kv.first_row(b * edgellm::BLOCK, layer, kv_head);
            const int8_t* keys = static_cast<const int8_t*>(kv.k) + first * width;
            for (int j = 0; j < TILES; ++j)
                rows.score(keys + edgellm::KV::key_place(j * edgellm::KEYS, 0, width),
                           kv.k_scale + first + j * edgellm::KEYS, width, scores + b * TILES + j, step);
        }
        std::fill(mass, mass + blocks, 0.0f);
        for (int i = 0; i < TILES; ++i) add_mass(scores + i * step, own * TILES + i + 1, mass);
        take_heaviest(mass, own, queries.mass, chosen + 1, taken);
    }
    chosen[0] = 0;
    for (int b = 0; b < blocks; ++b)
        if (taken[b]) chosen[1 + chosen[0]++] = b;
}
