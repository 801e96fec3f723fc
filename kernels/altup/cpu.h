// Several residual streams of a token; included once for each instruction set.

// A token's row in all streams: the first one, and the others side by side.
struct StreamRow {
    float *first, *others;
    int count, width;

    float* of(int stream) const { return stream ? others + size_t(stream - 1) * width : first; }
};

// Products of `rows` rows of a small matrix with the tanh of what the router makes of a row of the residual.
inline void route(const edgellm::AltUp& altup, const float* x, const StreamRow& row, float epsilon,
                  const float* matrix, int rows, float* out) {
    float routed[edgellm::MOST_STREAMS];
    const Vec scale = splat(inverse_rms(x, row.width, epsilon));
    for (int s = 0; s < row.count; ++s) {
        const float* router = altup.router + size_t(s) * row.width;
        Vec sum = {};
        for (int i = 0; i < row.width; i += LANES)
            sum += load(x + i) * scale * load(altup.router_norm + i) * load(router + i);
        routed[s] = std::tanh(sum_of(sum));
    }
    for (int r = 0; r < rows; ++r) {
        out[r] = 0;
        for (int s = 0; s < row.count; ++s) out[r] += matrix[r * row.count + s] * routed[s];
    }
}

// What a layer expects of all streams, in their place; it computes the first one from `x`.
inline void predict(const edgellm::AltUp& altup, const StreamRow& row, float epsilon, float* x) {
    constexpr int MOST = edgellm::MOST_STREAMS;
    const int count = row.count;
    float factors[MOST * MOST];
    route(altup, row.first, row, epsilon, altup.predict, count * count, factors);
    for (int i = 0; i < row.width; i += LANES) {
        Vec before[MOST];
        for (int s = 0; s < count; ++s) before[s] = load(row.of(s) + i);
        for (int s = 0; s < count; ++s) {
            Vec sum = before[s];
            for (int other = 0; other < count; ++other) sum += splat(factors[s * count + other]) * before[other];
            store(row.of(s) + i, sum);
        }
        store(x + i, load(row.first + i));
    }
}

// Corrects all streams by what the layer made of the first one, and leaves that one in `x`, scaled.
inline void correct(const edgellm::AltUp& altup, const StreamRow& row, float epsilon, float* x) {
    float factors[edgellm::MOST_STREAMS];
    route(altup, x, row, epsilon, altup.correct, row.count, factors);
    for (int i = 0; i < row.width; i += LANES) {
        const Vec change = load(x + i) - load(row.first + i);
        for (int s = 0; s < row.count; ++s)
            store(row.of(s) + i, load(row.of(s) + i) + change * splat(1.0f + factors[s]));
        store(x + i, load(row.first + i) * load(altup.scale + i));
    }
}

// Gives the other streams the magnitude of the first one.
inline void level(const StreamRow& row) {
    const auto mean_square = [&](const float* x) {
        Vec sum = {};
        for (int i = 0; i < row.width; i += LANES) sum += load(x + i) * load(x + i);
        return sum_of(sum) / static_cast<float>(row.width);
    };
    const float target = std::sqrt(mean_square(row.first));
    for (int s = 1; s < row.count; ++s) {
        float* x = row.of(s);
        const Vec scale = splat(target / std::sqrt(std::max(mean_square(x), 1e-5f)));
        for (int i = 0; i < row.width; i += LANES) store(x + i, load(x + i) * scale);
    }
}

// The mean of all streams.
inline void merge(const StreamRow& row, float* out) {
    const Vec share = splat(1.0f / static_cast<float>(row.count));
    for (int i = 0; i < row.width; i += LANES) {
        Vec sum = load(row.first + i);
        for (int s = 1; s < row.count; ++s) sum += load(row.of(s) + i);
        store(out + i, sum * share);
    }
}
