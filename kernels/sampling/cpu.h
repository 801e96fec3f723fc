// One pass over the scores of a vocabulary; included once for each instruction set.

inline double log_sum_exp(const float* scores, int64_t count) {
    Vec most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = larger(load(scores + i), most);
    float top = max_of(most);
    for (int64_t j = i; j < count; ++j) top = scores[j] > top ? scores[j] : top;
    // a float sum of 50,000 terms would be off by 1e-4, so every 4,096 go into a double
    double total = 0;
    for (int64_t from = 0; from < i; from += 4096) {
        Vec sum = {};
        for (int64_t j = from; j < i && j < from + 4096; j += LANES)
            sum += exp_negative(load(scores + j) - splat(top));
        total += sum_of(sum);
    }
    for (; i < count; ++i) total += exp_negative(splat(scores[i] - top))[0];
    return top + std::log(total);
}

// Collect what is above the k-th best score so far. `keep` is called with a full buffer and returns how
// many are left in it, the best k, and the lowest of their scores.
inline int64_t best_of(const float* scores, int64_t count, edgellm::Best& best) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const IVec above = load(scores + i) > splat(best.threshold);
        if (best.full() && max_of(-above) == 0) continue;
        for (int lane = 0; lane < LANES; ++lane) best.offer(scores[i + lane], i + lane);
    }
    for (; i < count; ++i) best.offer(scores[i], i);
    return best.finish();
}
