// Sealing of blocks; included once for each instruction set.

// Codes c of BITS bits for int8 ones, such that (2 c - top) times the scale that is given is near them: found with a
// scale that suits most rows, for 2 bits the best one of normally distributed numbers; the scale is then that of least
// squares.
template <int BITS>
inline float fit_values(const int8_t* x, int n, uint8_t* codes) {
    constexpr int TOP = (1 << BITS) - 1;
    int32_t most = 0, all = 0, product = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
        most = std::max(most, std::abs(int32_t(x[i])));
        all += x[i] * x[i];
    }
    const float first =
        BITS == 4 ? most * (1.0f / 16) : 0.498f * std::sqrt(static_cast<float>(all) / static_cast<float>(n));
    const float steps = first > 0 ? 0.5f / first : 0;
    for (int i = 0; i < n; ++i) {
        float up = x[i] * steps + 0.5f * (TOP + 1);
        up = up > TOP ? TOP : up;
        up = up > 0 ? up : 0;
        const int code = static_cast<int>(up), step = 2 * code - TOP;
        codes[i] = static_cast<uint8_t>(code);
        product += step * x[i];
        squares += step * step;
    }
    return static_cast<float>(product) / static_cast<float>(squares);
}

// Codes of BITS bits side by side: a byte has those of numbers that lie 1 / (8 / BITS) of a row apart.
template <int BITS>
inline void pack_codes(const uint8_t* codes, int n, uint8_t* packed) {
    constexpr int PARTS = 8 / BITS;
    const int bytes = n / PARTS;
    for (int i = 0; i < bytes; ++i) {
        int all = 0;
        for (int part = 0; part < PARTS; ++part) all |= codes[part * bytes + i] << BITS * part;
        packed[i] = static_cast<uint8_t>(all);
    }
}

template <int BITS>
inline void seal_values(const edgellm::KV& kv, size_t from, size_t to) {
    constexpr int SCALES = edgellm::value_scales(BITS);
    const int width = kv.head_dim, part = width / SCALES;
    const edgellm::KV bytes = kv.sealed_bytes(BITS);
    const int8_t* values = static_cast<const int8_t*>(kv.v) + from * width;
    uint16_t* scales = kv.sealed.v_scale + to * SCALES;
    int8_t x[edgellm::MAX_HEAD_DIM];
    uint8_t codes[edgellm::MAX_HEAD_DIM], packed[edgellm::MAX_HEAD_DIM];
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        for (int d = 0; d < width; ++d) x[d] = values[kv.value_place(row, d)];
        for (int i = 0; i < SCALES; ++i) {
            const float scale = fit_values<BITS>(x + i * part, part, codes + i * part);
            scales[i * edgellm::BLOCK + row] = half_of_float(kv.v_scale[from + row] * scale);
        }
        pack_codes<BITS>(codes, width, packed);
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

// Keys as they are, with their scales.
inline void seal_keys(const edgellm::KV& kv, size_t from, size_t to, edgellm::Bits<8>) {
    const size_t width = kv.head_dim;
    std::memcpy(static_cast<int8_t*>(kv.sealed.k) + to * width, static_cast<const int8_t*>(kv.k) + from * width,
                edgellm::BLOCK * width);
    for (int row = 0; row < edgellm::BLOCK; ++row) kv.sealed.k_scale[to + row] = half_of_float(kv.k_scale[from + row]);
}

// Keys by channel.
template <int BITS>
inline void seal_keys(const edgellm::KV& kv, size_t from, size_t to, edgellm::Bits<BITS>) {
    const int width = kv.head_dim;
    const int8_t* keys = static_cast<const int8_t*>(kv.k) + from * width;
    float* x = static_cast<float*>(edgellm::scratch(5 * edgellm::BLOCK * size_t(width)));
    uint8_t* codes = reinterpret_cast<uint8_t*>(x + edgellm::BLOCK * size_t(width));
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        float* key = x + size_t(row) * width;
        for (int d = 0; d < width; ++d) key[d] = keys[kv.key_place(row, d)] * kv.k_scale[from + row];
        hadamard(key, width);
    }
    float lines[2 * edgellm::MAX_HEAD_DIM];
    fit_channels(x, width, lines, codes);
    uint16_t* scales = kv.sealed.k_scale + to / edgellm::BLOCK * 2 * width;
    for (int i = 0; i < 2 * width; ++i) scales[i] = half_of_float(lines[i]);
    const edgellm::KV bytes = kv.sealed_bytes(BITS);
    uint8_t packed[edgellm::MAX_HEAD_DIM];
    for (int row = 0; row < edgellm::BLOCK; ++row) {
        pack_codes<BITS>(codes + size_t(row) * width, width, packed);
        write_bytes(bytes, true, reinterpret_cast<int8_t*>(packed), to, row);
    }
}

// Block number `block` of a sequence, for one layer and KV head.
inline void seal(const edgellm::KV& kv, int layer, int kv_head, int block) {
    const size_t from = kv.first_row_in(kv.table[block], layer, kv_head);
    const size_t to = kv.first_row_in(kv.sealed.table[block], layer, kv_head);
    edgellm::with_sealed_bits(kv.format, [&](auto key, auto value) {
        seal_keys(kv, from, to, key);
        seal_values<value()>(kv, from, to);
    });
}

inline void seal(const edgellm::SealCall& call) {
    const int heads = call.kv.kv_heads;
    edgellm::parallel(heads * (call.end - call.first), call.threads,
                      [&](int item) { seal(call.kv, call.layer, item % heads, call.first + item / heads); });
}
