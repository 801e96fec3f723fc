// Passes over the scores of a vocabulary; included once for each instruction set.

// The highest of each run of scores; those that are not a number are left out.
inline void find_peaks(const float* scores, int64_t count, float* peaks) {
    for (int64_t from = 0; from < count; from += edgellm::RUN) {
        const int64_t end = from + edgellm::RUN < count ? from + edgellm::RUN : count;
        Vec most = splat(-INFINITY);
        int64_t i = from;
        for (; i + LANES <= end; i += LANES) most = larger(load(scores + i), most);
        float top = max_of(most);
        for (; i < end; ++i) top = scores[i] > top ? scores[i] : top;
        peaks[from / edgellm::RUN] = top;
    }
}

// log(sum(exp(scores))), where the highest score is `top`.
inline double log_sum_exp(const float* scores, int64_t count, float top) {
    // a float sum of 50,000 terms would be off by 1e-4, so every 4,096 go into a double
    double total = 0;
    int64_t i = 0;
    while (i + LANES <= count) {
        const int64_t end = i + 4096 < count ? i + 4096 : count;
        Vec sum = {};
        for (; i + LANES <= end; i += LANES) sum += exp_negative(load(scores + i) - splat(top));
        total += sum_of(sum);
    }
    for (; i < count; ++i) total += exp_negative(splat(scores[i] - top))[0];
    return top + std::log(total);
}
