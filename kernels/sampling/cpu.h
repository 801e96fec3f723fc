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

// The sum of exp(score - top) over a part of the scores, none of which is above `top`. A float sum of all
// 50,000 terms would be off by 1e-4, so those of parts are added as doubles.
inline double sum_exp(const float* scores, int64_t count, float top) {
    Vec sum = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum += exp_negative(load(scores + i) - splat(top));
    double total = sum_of(sum);
    for (; i < count; ++i) total += exp_negative(splat(scores[i] - top))[0];
    return total;
}
