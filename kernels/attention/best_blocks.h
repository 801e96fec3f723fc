// The sealed blocks that matter most to a row (Quest, Tang et al., arXiv:2406.10774); included once for each instruction
// set.

// The largest score that a query can have with a key of a sealed block of k4v4, whose codes are 0 .. 15.
inline float score_bound(const float* q, const float* half, int width) {
    const float* middle = half + width;
    Vec sum = {};
    for (int d = 0; d < width; d += LANES) {
        const int count = std::min(LANES, width - d);
        const Vec x = load_some(q + d, count);
        sum += x * load_some(middle + d, count) + magnitude(x * load_some(half + d, count)) * splat(15);
    }
    return sum_of(sum);
}

// Blocks that the first token of a task reads, for all heads that share a KV head: the first one, the last two, and the
// sealed ones with the largest scores that any of these heads could have there. Their numbers go to `chosen`, in order.
inline edgellm::BlockList choose_blocks(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task,
                                        int32_t* chosen) {
    const int group = queries.heads / kv.kv_heads, width = kv.head_dim, token = task.first / group;
    const int position = queries.start + token, own = position / edgellm::BLOCK;
    const int count = edgellm::blocks_read(position, queries.kv_read), best = count - 3;
    if (own < count) {
        for (int i = 0; i < count; ++i) chosen[i] = i;
        return {chosen, count, 0};
    }
    struct Bound {
        float score;
        int32_t block;
    };
    const int end = edgellm::KV::sealed_end(position + 1);
    Bound* bounds = static_cast<Bound*>(edgellm::scratch(sizeof(Bound) * size_t(end)));
    const float* q = queries.q + (size_t(token) * queries.heads + size_t(task.kv_head) * group) * width;
    const auto channels = [&](int block) {
        const size_t row = kv.first_row_in(kv.sealed.table[block], task.layer, task.kv_head);
        return kv.sealed.k_scale + row / edgellm::BLOCK * 2 * width;
    };
    for (int block = 1; block < end; ++block) {
        const float *half = channels(block), *ahead = channels(std::min(block + 1, end - 1));
        for (int d = 0; d < 2 * width; d += 16) fetch(ahead + d);
        float most = -INFINITY;  // also of a broken query, which the first block shows
        for (int h = 0; h < group; ++h) most = std::max(most, score_bound(q + size_t(h) * width, half, width));
        bounds[block - 1] = {most, block};
    }
    std::nth_element(bounds, bounds + best, bounds + end - 1, [](const Bound& a, const Bound& b) {
        return a.score > b.score || (a.score == b.score && a.block > b.block);
    });
    std::sort(bounds, bounds + best, [](const Bound& a, const Bound& b) { return a.block < b.block; });
    chosen[0] = 0;
    for (int i = 0; i < best; ++i) chosen[1 + i] = bounds[i].block;
    chosen[count - 2] = own - 1;
    chosen[count - 1] = own;
    return {chosen, count, 0};
}
