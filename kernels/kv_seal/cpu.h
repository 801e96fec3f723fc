// Sealing of blocks; included once for each instruction set.

// One row of int8 codes to 4 bits with the scale that is best by least squares; gives it in steps of the codes.
inline float seal_row(const float* x, int n, uint8_t* packed) {
    quantize_row4(x, n, packed);
    float product = 0, squares = 0;
    for (int i = 0; i < n / 2; ++i) {
        const float low = 2.0f * (packed[i] & 15) - 15, high = 2.0f * (packed[i] >> 4) - 15;
        product += low * x[i] + high * x[i + n / 2];
        squares += low * low + high * high;
    }
    return product / squares;
}

inline void seal_values(const edgellm::KV& kv, size_t from, size_t to) {
    const int width = kv.head_dim;
    const edgellm::KV bytes = kv.sealed_bytes();
    const int8_t* values = static_cast<const int8_t*>(kv.v) + from * width;
    float x[edgellm::MAX_HEAD_DIM];
    uint8_t packed[edgellm::MAX_HEAD_DIM / 2];
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        for (int d = 0; d < width; ++d) x[d] = values[kv.value_place(row, d)];
        kv.sealed.v_scale[to + row] = kv.v_scale[from + row] * seal_row(x, width, packed);
        write_bytes(bytes, false, reinterpret_cast<int8_t*>(packed), to, row);
    }
}

// Half a range and its middle in each channel, [2, n], such that (2 c - 15) half + middle is near x [BLOCK, n] for
// codes c of 4 bits: first from the smallest and the largest number, then by least squares for these codes.
inline void fit_channels(const float* x, int n, float* half, uint8_t* codes) {
    float* middle = half + n;
    float low[edgellm::MAX_HEAD_DIM], high[edgellm::MAX_HEAD_DIM];
    std::memcpy(low, x, 4 * size_t(n));
    std::memcpy(high, x, 4 * size_t(n));
    for (int row = 1; row < edgellm::BLOCK; ++row)
        for (int d = 0; d < n; ++d) {
            low[d] = std::min(low[d], x[size_t(row) * n + d]);
            high[d] = std::max(high[d], x[size_t(row) * n + d]);
        }
    float center[edgellm::MAX_HEAD_DIM], steps[edgellm::MAX_HEAD_DIM];
    for (int d = 0; d < n; ++d) {
        const float range = high[d] - low[d];
        center[d] = 0.5f * (low[d] + high[d]);
        steps[d] = range > 0 ? 15 / range : 0;
    }
    float sum[edgellm::MAX_HEAD_DIM] = {}, squares[edgellm::MAX_HEAD_DIM] = {};
    float total[edgellm::MAX_HEAD_DIM] = {}, product[edgellm::MAX_HEAD_DIM] = {};
    for (int row = 0; row < edgellm::BLOCK; ++row)
        for (int d = 0; d < n; ++d) {
            const float rest = x[size_t(row) * n + d] - center[d];
            float up = rest * steps[d] + 8;
            up = up > 15 ? 15 : up;
            up = up > 0 ? up : 0;  // NaN becomes 0
            const int code = static_cast<int>(up);
            codes[size_t(row) * n + d] = static_cast<uint8_t>(code);
            const float step = static_cast<float>(2 * code - 15);
            sum[d] += step;
            squares[d] += step * step;
            total[d] += rest;
            product[d] += step * rest;
        }
    for (int d = 0; d < n; ++d) {
        const float spread = edgellm::BLOCK * squares[d] - sum[d] * sum[d];
        half[d] = (edgellm::BLOCK * product[d] - sum[d] * total[d]) / (spread > 0 ? spread : 1);
        middle[d] = center[d] + (total[d] - half[d] * sum[d]) / edgellm::BLOCK;
    }
}

inline void seal_keys(const edgellm::KV& kv, size_t from, size_t to) {
    const int width = kv.head_dim;
    const int8_t* keys = static_cast<const int8_t*>(kv.k) + from * width;
    if (kv.format == edgellm::K8V4) {
        std::memcpy(static_cast<int8_t*>(kv.sealed.k) + to * width, keys, edgellm::BLOCK * size_t(width));
        std::memcpy(kv.sealed.k_scale + to, kv.k_scale + from, 4 * edgellm::BLOCK);
        return;
    }
    float* x = static_cast<float*>(edgellm::scratch(5 * edgellm::BLOCK * size_t(width)));
    uint8_t* codes = reinterpret_cast<uint8_t*>(x + edgellm::BLOCK * size_t(width));
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        float* key = x + size_t(row) * width;
        for (int d = 0; d < width; ++d) key[d] = keys[kv.key_place(row, d)] * kv.k_scale[from + row];
        hadamard(key, width);
    }
    fit_channels(x, width, kv.sealed.k_scale + to / edgellm::BLOCK * 2 * width, codes);
    const edgellm::KV bytes = kv.sealed_bytes();
    uint8_t packed[edgellm::MAX_HEAD_DIM / 2];
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        const uint8_t* code = codes + size_t(row) * width;
        for (int d = 0; d < width / 2; ++d) packed[d] = static_cast<uint8_t>(code[d] | code[width / 2 + d] << 4);
        write_bytes(bytes, true, reinterpret_cast<int8_t*>(packed), to, row);
    }
}

// Block number `block` of a sequence, for one layer and KV head.
inline void seal(const edgellm::KV& kv, int layer, int kv_head, int block) {
    const size_t from = kv.first_row_in(kv.table[block], layer, kv_head);
    const size_t to = kv.first_row_in(kv.sealed.table[block], layer, kv_head);
    seal_keys(kv, from, to);
    seal_values(kv, from, to);
}

inline void seal(const edgellm::SealCall& call) {
    const int heads = call.kv.kv_heads;
    edgellm::parallel(heads * (call.end - call.first), call.threads,
                      [&](int item) { seal(call.kv, call.layer, item % heads, call.first + item / heads); });
}
