// Vectors of LANES floats or integers and the operations that need an instruction of their own.
// Included by every_isa.h once for each instruction set.

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
// Four bytes a lane.
typedef int8_t Bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
// One byte a lane.
typedef int8_t Narrow __attribute__((vector_size(LANES), aligned(1), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Bytes load_bytes(const void* p) { return *static_cast<const Bytes*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline void store_narrow(int8_t* p, IVec v) {
    *reinterpret_cast<Narrow*>(p) = __builtin_convertvector(v, Narrow);
}
// LANES bytes as integers; from a conversion of vectors GCC makes a move for each byte.
inline IVec load_narrow(const void* p) {
#if defined(EDGELLM_VNNI512)
    return (IVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(EDGELLM_AVX2)
    return (IVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
    return __builtin_convertvector(*static_cast<const Narrow*>(p), IVec);
#endif
}
// The first `count` of a vector, of which LANES and more are all; then zeros are read, and nothing is written.
inline Vec load_some(const float* p, int count) {
    if (count >= LANES) return load(p);
    Vec v = {};
    std::memcpy(&v, p, 4 * size_t(count));
    return v;
}
inline void store_some(int8_t* p, IVec v, int count) {
    if (count >= LANES) return store_narrow(p, v);
    const Narrow narrow = __builtin_convertvector(v, Narrow);
    std::memcpy(p, &narrow, count);
}
// On a large lambda: GCC leaves it out of the function, and then stores what it reads at every step of a loop before
// it, which took a half longer.
#define EDGELLM_INLINED __attribute__((always_inline))
// The low and the high four bits of bytes, 0 .. 15.
inline Bytes low_halves(Bytes v) { return v & int8_t(15); }
inline Bytes high_halves(Bytes v) { return (Bytes)((IVec)v >> 4) & int8_t(15); }
// BITS bits of each byte, from the bit FROM on.
template <int BITS, int FROM>
inline Bytes bits_of(Bytes v) { return (Bytes)((IVec)v >> FROM) & int8_t((1 << BITS) - 1); }
inline Vec splat(float x) { return x - Vec{}; }
inline IVec splat_int(int32_t x) { return x - IVec{}; }
inline Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }

// The same four bytes in every lane.
inline Bytes splat_quad(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return (Bytes)splat_int(quad);
}

// body(0), body(1) .. body(N - 1), written out by the compiler's front end, so that arrays indexed by it
// are registers: GCC may unroll a loop too late for that, and store its accumulators at every step.
template <int... I, typename Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, const Body& body) {
    (body(I), ...);
}
template <int N, typename Body>
inline __attribute__((always_inline)) void unrolled(const Body& body) {
    unrolled(std::make_integer_sequence<int, N>{}, body);
}

// a * b + c, rounded once wherever there is an instruction for it, however the compiler puts operations together.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(EDGELLM_VNNI512)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(EDGELLM_AVX2)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(EDGELLM_ARM)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Integer sums that are to be scaled start from ZERO: such a sum, below 2^22, read as the bits of a float
// is 1.5 * 2^23 more than itself, so one fused operation converts and scales it, and rounds once.
#if defined(EDGELLM_VNNI512) || defined(EDGELLM_AVX2) || defined(EDGELLM_NEON)
constexpr int32_t ZERO = 0x4b400000;
inline Vec zero_scaled(Vec scale) { return scale * splat(-12582912.0f); }
inline Vec scaled(IVec sum, Vec scale, Vec zero) {
#if defined(EDGELLM_VNNI512)
    return (Vec)_mm512_fmadd_ps((__m512)sum, (__m512)scale, (__m512)zero);
#elif defined(EDGELLM_AVX2)
    return (Vec)_mm256_fmadd_ps((__m256)sum, (__m256)scale, (__m256)zero);
#else
    return (Vec)vfmaq_f32((float32x4_t)zero, (float32x4_t)sum, (float32x4_t)scale);
#endif
}
#else
constexpr int32_t ZERO = 0;
inline Vec zero_scaled(Vec) { return Vec{}; }
inline Vec scaled(IVec sum, Vec scale, Vec) { return to_float(sum) * scale; }
#endif

// Lanes in another order: SHUFFLE(v, SWAP4) exchanges runs of four.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, IVec{__VA_ARGS__})
#endif
#if LANES == 16
#define SWAP8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define SWAP4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define SWAP2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define SWAP1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif LANES == 8
#define SWAP4 4, 5, 6, 7, 0, 1, 2, 3
#define SWAP2 2, 3, 0, 1, 6, 7, 4, 5
#define SWAP1 1, 0, 3, 2, 5, 4, 7, 6
#else
#define SWAP2 2, 3, 0, 1
#define SWAP1 1, 0, 3, 2
#endif

// Combine all lanes into every lane.
template <typename V, typename Combine>
inline V over_lanes(V v, const Combine& combine) {
#if LANES == 16
    v = combine(v, SHUFFLE(v, SWAP8));
#endif
#if LANES >= 8
    v = combine(v, SHUFFLE(v, SWAP4));
#endif
    v = combine(v, SHUFFLE(v, SWAP2));
    return combine(v, SHUFFLE(v, SWAP1));
}
// Sums and differences of lanes whose numbers differ in bit BIT.
template <int BIT>
inline Vec sums_and_differences(Vec v, Vec partner) {
    IVec lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return partner + v * to_float(1 - 2 * (lane >> BIT & 1));
}
// The Hadamard transform of the lanes, without the norm.
inline Vec hadamard_lanes(Vec v) {
    v = sums_and_differences<0>(v, SHUFFLE(v, SWAP1));
    v = sums_and_differences<1>(v, SHUFFLE(v, SWAP2));
#if LANES >= 8
    v = sums_and_differences<2>(v, SHUFFLE(v, SWAP4));
#endif
#if LANES == 16
    v = sums_and_differences<3>(v, SHUFFLE(v, SWAP8));
#endif
    return v;
}
#undef SHUFFLE
#undef SWAP8
#undef SWAP4
#undef SWAP2
#undef SWAP1

inline float sum_of(Vec v) {
    return over_lanes(v, [](Vec a, Vec b) { return a + b; })[0];
}
inline int32_t sum_of(IVec v) {
    return over_lanes(v, [](IVec a, IVec b) { return a + b; })[0];
}
inline float max_of(Vec v) {
    return over_lanes(v, [](Vec a, Vec b) { return a > b ? a : b; })[0];
}
inline int32_t max_of(IVec v) {
    return over_lanes(v, [](IVec a, IVec b) { return a > b ? a : b; })[0];
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline IVec larger(IVec a, IVec b) { return a > b ? a : b; }
// |v| as bits, which are in the same order as the values; NaN and infinity are the largest.
inline IVec size_bits(Vec v) { return (IVec)v & 0x7fffffff; }
inline Vec magnitude(Vec v) { return (Vec)size_bits(v); }

// To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no room for a fraction.
inline Vec nearest(Vec x) {
    const Vec shift = splat(12582912.0f);
    return (x + shift) - shift;
}

// e^x for x <= 0, relative error below 1e-7 (Cephes' expf); 0 below -87.
inline Vec exp_negative(Vec x) {
    const IVec underflow = x < splat(-87.0f);
    x = underflow ? splat(-87.0f) : x;
    const Vec scaled = x * splat(1.44269504f) - splat(0.5f);
    const IVec n = __builtin_convertvector(scaled, IVec);  // towards zero: rounds x / ln 2
    const Vec whole = to_float(n);
    const Vec r = x - whole * splat(0.693359375f) + whole * splat(2.12194440e-4f);
    Vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const IVec power = (n + 127) << 23;
    const Vec result = p * (Vec)power;  // the same bits
    return underflow ? Vec{} : result;
}

inline Vec tanh_of(Vec x) {
    const Vec e = exp_negative(magnitude(x) * splat(-2.0f));
    const Vec t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return x < Vec{} ? -t : t;
}

// x = cap * tanh(x / cap) for `n` numbers, a multiple of LANES.
inline void soft_cap(float* x, int n, float cap) {
    for (int i = 0; i < n; i += LANES)
        store(x + i, tanh_of(load(x + i) * splat(1.0f / cap)) * splat(cap));
}

// 1 / sqrt(mean square of n numbers + epsilon)
inline float inverse_rms(const float* x, int n, float epsilon) {
    Vec squares = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    float sum = sum_of(squares);
    for (; i < n; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / static_cast<float>(n) + epsilon);
}

inline float float_of_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits;
    if (rest >= 0x7c00) {  // infinity, NaN
        bits = 0x7f800000 | (rest & 0x3ff) << 13;
    } else {  // shifted into place with an exponent that a product corrects, subnormals too
        bits = rest << 13;
        float value;
        std::memcpy(&value, &bits, 4);
        value *= 5.192296858534828e33f;  // 2^112
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// LANES half-precision floats.
inline Vec load_halves(const uint16_t* p) {
#if defined(EDGELLM_VNNI512)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, halves);
#elif defined(EDGELLM_AVX2)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(EDGELLM_NEON)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Vec v;
    for (int i = 0; i < LANES; ++i) v[i] = float_of_half(p[i]);
    return v;
#endif
}
// `n` half-precision floats, a multiple of LANES, as floats.
inline void widen(const uint16_t* from, int n, float* to) {
    for (int i = 0; i < n; i += LANES) store(to + i, load_halves(from + i));
}

// sum[lane] += a[4 lane + i] * b[4 lane + i] over i < 4; a is 0 .. 127, b is -127 .. 127.
inline IVec dot(IVec sum, Bytes a, Bytes b) {
#if defined(EDGELLM_VNNI512)
    return (IVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(EDGELLM_VNNI256)
    return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(EDGELLM_AVX2)  // two products of at most 127 * 127 fit 16 bits
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
    return sum + (IVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(EDGELLM_NEON)
    return (IVec)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#else
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i) sum[lane] += int32_t(a[4 * lane + i]) * b[4 * lane + i];
    return sum;
#endif
}

// The same for a from -127 to 127. VNNI multiplies unsigned by signed bytes, so there `operand`
// makes a + 128 of a, and the sum has to start from START * (sum of b).
#if defined(EDGELLM_VNNI512) || defined(EDGELLM_VNNI256)
constexpr int32_t START = -128;
inline Bytes operand(Bytes a) { return a ^ int8_t(-128); }
inline IVec dot_signed(IVec sum, Bytes a, Bytes b) { return dot(sum, a, b); }
#else
constexpr int32_t START = 0;
inline Bytes operand(Bytes a) { return a; }
inline IVec dot_signed(IVec sum, Bytes a, Bytes b) {
#if defined(EDGELLM_AVX2)
    const __m256i size = _mm256_abs_epi8((__m256i)a);
    return dot(sum, (Bytes)size, (Bytes)_mm256_sign_epi8((__m256i)b, (__m256i)a));
#else
    return dot(sum, a, b);
#endif
}
#endif

// A sum of `dot` whose a is a code of few bits, 0 .. MOST. It is whole after `settle`, and at most LIMIT calls of `add` lie
// between two of those. AVX2 without VNNI adds up in 16 bits: two instructions in place of three.
template <int MOST>
class CodeSum {
public:
    static constexpr int LIMIT = 32767 / (2 * 127 * MOST);

    explicit CodeSum(IVec start = IVec{}) : sum_(start) {}
    IVec sum() const { return sum_; }

#if defined(EDGELLM_AVX2) && !defined(EDGELLM_VNNI256) && !defined(EDGELLM_VNNI512)
    void add(Bytes a, Bytes b) { part_ += (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
    void settle() {
        sum_ += (IVec)_mm256_madd_epi16((__m256i)part_, _mm256_set1_epi16(1));
        part_ = Shorts{};
    }

private:
    typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
    Shorts part_ = {};
#else
    void add(Bytes a, Bytes b) { sum_ = dot(sum_, a, b); }
    void settle() {}

private:
#endif
    IVec sum_;
};

// The same of `dot_signed`, which is whole at once.
class SignedSum {
public:
    static constexpr int LIMIT = 1;

    explicit SignedSum(IVec start = IVec{}) : sum_(start) {}
    IVec sum() const { return sum_; }
    void add(Bytes a, Bytes b) { sum_ = dot_signed(sum_, a, b); }
    void settle() {}

private:
    IVec sum_;
};

template <typename Sums, int R, int C>
inline void settle(Sums (&sums)[R][C]) {
    unrolled<R>([&](int r) EDGELLM_INLINED { unrolled<C>([&](int c) EDGELLM_INLINED { sums[r][c].settle(); }); });
}

// What the codes of IQ4_NL and IQ4_XS stand for, and twice what those of E2M1 floats do.
alignas(16) constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// table[index] for each byte, ready to be multiplied; indices are 0 .. 15.
inline Bytes lookup(const int8_t* table, Bytes index) {
#if defined(EDGELLM_VNNI512)
    const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return operand((Bytes)_mm512_shuffle_epi8(all, (__m512i)index));
#elif defined(EDGELLM_AVX2)
    const __m256i all =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return operand((Bytes)_mm256_shuffle_epi8(all, (__m256i)index));
#elif defined(EDGELLM_NEON)
    return (Bytes)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)index);
#else
    Bytes values;
    for (int i = 0; i < 4 * LANES; ++i) values[i] = table[index[i]];
    return values;
#endif
}
