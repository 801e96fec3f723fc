// Floats to fewer bits; included by every_isa.h once for each instruction set.

// The nearest codes, -127 .. 127: a subnormal scale has an infinite inverse.
inline IVec store_codes(Vec x, int8_t* codes) {
    Vec code = nearest(x);
    code = code > splat(127.0f) ? splat(127.0f) : code;
    code = code > splat(-127.0f) ? code : splat(-127.0f);
    const IVec whole = __builtin_convertvector(code, IVec);
    store_narrow(codes, whole);
    return whole;
}

inline int8_t code_of(float x) {
    const float code = nearest(splat(x))[0];
    return static_cast<int8_t>(code > 127 ? 127 : code > -127 ? code : -127);
}

// The float of these bits; NaN in place of an infinity, so that it shows.
inline float finite_or_nan(int32_t bits) {
    constexpr int32_t INFINITE = 0x7f800000;
    float value;
    std::memcpy(&value, &bits, 4);
    return bits < INFINITE ? value : NAN;
}

// max|x|. A NaN or an infinity gives NaN.
inline float largest_size(const float* x, int n) {
    IVec largest = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) largest = larger(size_bits(load(x + i)), largest);
    int32_t bits = max_of(largest);
    for (; i < n; ++i) bits = std::max(bits, size_bits(splat(x[i]))[0]);
    return finite_or_nan(bits);
}

// int8 codes of `n` floats with one scale, max|x| / 127; `total` is the sum of the codes.
struct RowScale {
    float scale;
    int32_t total;
};

inline RowScale quantize_row(const float* x, int n, int8_t* codes) {
    const float scale = largest_size(x, n) * (1.0f / 127);
    const float inverse = scale > 0 ? 1 / scale : 0;
    IVec sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += store_codes(load(x + i) * splat(inverse), codes + i);
    int32_t total = sum_of(sum);
    for (; i < n; ++i) total += codes[i] = code_of(x[i] * inverse);
    return {scale, total};
}

// What `quantize_row` rounded off, in steps of scale / FINE_STEPS: -127 .. 127.
constexpr int32_t FINE_STEPS = 254;

// Gives the sum of the fine codes.
inline int32_t quantize_rest(const float* x, int n, float scale, const int8_t* codes, int8_t* rest) {
    IVec sum = {};
    const float steps = scale > 0 ? FINE_STEPS / scale : 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Vec whole = to_float(load_narrow(codes + i));
        sum += store_codes((load(x + i) - whole * splat(scale)) * splat(steps), rest + i);
    }
    int32_t total = sum_of(sum);
    for (; i < n; ++i) total += rest[i] = code_of((x[i] - scale * codes[i]) * steps);
    return total;
}

inline uint16_t half_of_float(float value) {
#if defined(EDGELLM_AVX2) || defined(EDGELLM_VNNI512)
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
    if (bits < 0x38800000) {                       // subnormal: the sum rounds at the right bit
        float size;
        std::memcpy(&size, &bits, 4);
        size += 0.5f;
        std::memcpy(&bits, &size, 4);
        return sign | static_cast<uint16_t>(bits - 0x3f000000);
    }
    const uint32_t odd = bits >> 13 & 1;
    return sign | static_cast<uint16_t>((bits - 0x38000000 + 0xfff + odd) >> 13);
#endif
}
