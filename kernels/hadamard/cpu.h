// The Walsh-Hadamard transform; included by every_isa.h once for each instruction set.

// Of blocks smaller than a vector.
inline void hadamard_blocks(float* x, int n, int size) {
    for (int half = 1; half < size; half *= 2)
        for (int first = 0; first < n; first += 2 * half)
            for (int i = first; i < first + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    const float norm = 1.0f / std::sqrt(static_cast<float>(size));
    for (int i = 0; i < n; ++i) x[i] *= norm;
}

// One head, in place, in blocks of the largest power of two that divides `n`.
inline void hadamard(float* x, int n) {
    const int size = n & -n;
    if (size < LANES) return hadamard_blocks(x, n, size);
    for (int i = 0; i < n; i += LANES) store(x + i, hadamard_lanes(load(x + i)));
    for (int half = LANES; half < size; half *= 2)
        for (int first = 0; first < n; first += 2 * half)
            for (int i = first; i < first + half; i += LANES) {
                const Vec a = load(x + i), b = load(x + i + half);
                store(x + i, a + b);
                store(x + i + half, a - b);
            }
    const Vec norm = splat(1.0f / std::sqrt(static_cast<float>(size)));
    for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) * norm);
}
