// The panels of keys that take most of the attention of a head at a whole block of query positions; included once for
// each instruction set.
//
// The last query of each sixteen is asked for its softmax over all keys, for a sixteenth of the products of scores, as
// in SampleAttention (Zhu et al., arXiv:2406.15486). What these eight give to a panel tells what all queries would.

constexpr int ASKED = edgellm::PANELS;  // queries of a block
static_assert(ASKED == 2 * TILE, "their scores are made in two tiles");

// Adds what an asked query gives to each of the first `panels`, by its scores in blocks ASKED * BLOCK apart, to `mass`;
// one with a NaN gives nothing. `sums` has room for all panels.
inline void add_mass(const float* scores, int panels, float* sums, float* mass) {
    const auto at = [&](int p) {
        return scores + size_t(p / edgellm::PANELS) * ASKED * edgellm::BLOCK + p % edgellm::PANELS * edgellm::KEYS;
    };
    Vec most = splat(-INFINITY);
    for (int p = 0; p < panels; ++p)
        for (int j = 0; j < edgellm::KEYS; j += LANES) most = larger(load(at(p) + j), most);
    const Vec top = splat(max_of(most));
    float total = 0;
    for (int p = 0; p < panels; ++p) {
        Vec sum = {};
        for (int j = 0; j < edgellm::KEYS; j += LANES) sum += exp_negative(load(at(p) + j) - top);
        total += sums[p] = sum_of(sum);
    }
    if (!(total > 0 && total < INFINITY)) return;
    for (int p = 0; p < panels; ++p) mass[p] += sums[p] / total;
}

// Marks the panels of the first block, the queries' own and the one before, and the fewest others, in number a multiple
// of a block's, with which they have `share` of the mass. `order` has room for all panels.
inline void take_heaviest(const float* mass, int own, float share, int32_t* order, uint8_t* taken) {
    const int panels = (own + 1) * edgellm::PANELS;
    float held = 0, all = 0;
    int32_t* end = order;
    for (int p = 0; p < panels; ++p) {
        all += mass[p];
        const int block = p / edgellm::PANELS;
        taken[p] = block == 0 || block + 1 >= own;
        if (taken[p])
            held += mass[p];
        else
            *end++ = p;
    }
    if (all == 0) std::fill(taken, taken + panels, 1);  // a NaN in a key, which shows so
    const auto lighter = [&](int32_t a, int32_t b) { return mass[a] < mass[b] || (mass[a] == mass[b] && a < b); };
    std::make_heap(order, end, lighter);
    for (int count = 0; order < end && (held < share * all || count % edgellm::PANELS); ++count) {
        std::pop_heap(order, end, lighter);
        held += mass[*--end];
        taken[*end] = 1;
    }
}

// The panels that a head reads at a block of query positions, in order; they go to its list.
inline void choose_panels(const edgellm::KV& kv, const edgellm::Queries& queries, int layer, int head, int own,
                          const edgellm::PanelLists& lists) {
    const int width = kv.head_dim, panels = (own + 1) * edgellm::PANELS;
    const int kv_head = head / (queries.heads / kv.kv_heads);
    const size_t coded = (CodedQueries::bytes(width) + 63) / 64 * 64, scored = size_t(panels) * ASKED * edgellm::KEYS;
    char* memory = static_cast<char*>(edgellm::scratch(coded + 4 * (scored + 2 * panels) + panels));
    CodedQueries rows(memory, width);
    float *scores = reinterpret_cast<float*>(memory + coded), *mass = scores + scored, *sums = mass + panels;
    auto* taken = reinterpret_cast<uint8_t*>(sums + panels);
    int32_t* list = lists.list(own, head);
    std::fill(taken, taken + panels, 1);
    if (queries.mass < 1) {
        for (int i = 0; i < ASKED; ++i) {
            const size_t token = own * edgellm::BLOCK - queries.start + (i + 1) * edgellm::KEYS - 1;
            rows.set(i, queries.q + (token * queries.heads + head) * width, queries.scale, true);
        }
        for (int block = 0; block <= own; ++block) {
            const size_t first = kv.first_row(block * edgellm::BLOCK, layer, kv_head);
            const int8_t* keys = static_cast<const int8_t*>(kv.k) + first * width;
            float* of_block = scores + size_t(block) * ASKED * edgellm::BLOCK;
            for (int i = 0; i < ASKED; i += TILE)
                rows.score<TILE, false, false>(i, edgellm::BLOCK, keys, kv.k_scale + first, keys,
                                               of_block + i * edgellm::BLOCK);
            if (queries.softcap > 0) soft_cap(of_block, ASKED * edgellm::BLOCK, queries.softcap);
        }
        std::fill(mass, mass + panels, 0.0f);
        for (int i = 0; i < ASKED; ++i) add_mass(scores + i * edgellm::BLOCK, own * edgellm::PANELS + i + 1, sums, mass);
        take_heaviest(mass, own, queries.mass, list + 1, taken);
    }
    list[0] = 0;
    for (int p = 0; p < panels; ++p)
        if (taken[p]) list[1 + list[0]++] = p;
}
