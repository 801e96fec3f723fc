// The largest share of its attention that any of some queries gives to each key, as KVzip asks for it (Kim et al.,
// arXiv:2505.23416); included once for each instruction set.

// Raises `shares` [blocks * BLOCK] of the keys of blocks `from` to before `to`, which all queries see. `sums` has what
// each row's attention came to, [rows, value_dim + 2].
template <typename Rows>
inline void raise_shares_of(const edgellm::KV& kv, const edgellm::Queries& queries, int layer, int kv_head, int from,
                            int to, const float* sums, float* shares) {
    const edgellm::RowOrder order = queries.order(kv.kv_heads);
    const int all = queries.tokens * order.group, first_head = kv_head * order.group;
    float* scores = static_cast<float*>(edgellm::scratch(4 * TILE * edgellm::BLOCK + Rows::bytes(kv)));
    Rows rows(kv, reinterpret_cast<char*>(scores + TILE * edgellm::BLOCK));
    const auto tile = [&](auto count, int first, int r, float* of_keys) {
        rows.template score<count(), false>(r, edgellm::BLOCK, scores);
        for (int i = 0; i < count(); ++i) {
            float* score = scores + i * edgellm::BLOCK;
            if (queries.softcap > 0) soft_cap(score, edgellm::BLOCK, queries.softcap);
            const int row = first + r + i, head = first_head + order[row].head;
            const float* sum = sums + size_t(row) * (kv.value_dim() + 2);
            const float total = sum[1] + (queries.sinks ? std::exp(queries.sinks[head] - sum[0]) : 0);
            const Vec top = splat(sum[0]), inverse = splat(1 / total);
            for (int j = 0; j < edgellm::BLOCK; j += LANES)
                store(of_keys + j, larger(load(of_keys + j), exp_negative(load(score + j) - top) * inverse));
        }
    };
    for (int first = 0; first < all; first += edgellm::ROWS_PER_TASK) {
        const int count = std::min(edgellm::ROWS_PER_TASK, all - first);
        for (int r = 0; r < count; ++r) {
            const auto [token, head] = order[first + r];
            const size_t at = size_t(token) * queries.heads + first_head + head;
            rows.set_query(r, queries.q + at * kv.key_dim(), queries.scale);
        }
        for (int block = from; block < to; ++block) {
            const edgellm::BlockPlace place = kv.place(block * edgellm::BLOCK, queries.start, layer, kv_head);
            rows.open(place, place, edgellm::BLOCK);
            float* of_keys = shares + size_t(block) * edgellm::BLOCK;
            int r = 0;
            for (; r + TILE <= count; r += TILE) tile(edgellm::Bits<TILE>{}, first, r, of_keys);
            for (; r < count; ++r) tile(edgellm::Bits<1>{}, first, r, of_keys);
        }
    }
}

inline void raise_shares(const edgellm::KV& kv, const edgellm::Queries& queries, int layer, int kv_head, int from,
                         int to, const float* sums, float* shares) {
    switch (kv.format) {
        case edgellm::F32:
            return raise_shares_of<FloatRows<float>>(kv, queries, layer, kv_head, from, to, sums, shares);
        case edgellm::F16:
            return raise_shares_of<FloatRows<uint16_t>>(kv, queries, layer, kv_head, from, to, sums, shares);
        default: return raise_shares_of<Int8Rows>(kv, queries, layer, kv_head, from, to, sums, shares);
    }
}
