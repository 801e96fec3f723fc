// The norm of a row, and the MLP of some, up to its second product; included once for each instruction set.

// The norm of a row; `n` is a multiple of the widest vector.
inline void scaled_norm(const float* x, const edgellm::Norm& norm, int n, float epsilon, float* out) {
    if (!norm.bias) {
        const Vec scale = splat(inverse_rms(x, n, epsilon));
        for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) * scale * load(norm.weight + i));
        return;
    }
    Vec sum = {};
    for (int i = 0; i < n; i += LANES) sum += load(x + i);
    const Vec mean = splat(sum_of(sum) / static_cast<float>(n));
    for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) - mean);
    const Vec scale = splat(inverse_rms(out, n, epsilon));
    for (int i = 0; i < n; i += LANES)
        store(out + i, load(out + i) * scale * load(norm.weight + i) + load(norm.bias + i));
}

inline Vec sigmoid(Vec t) {
    const Vec e = exp_negative(-magnitude(t));
    return (t < Vec{} ? e : splat(1.0f)) / (splat(1.0f) + e);
}

// What the MLP of a layer, or one of its experts, has before its second product.
struct Mlp {
    edgellm::Linear gate, up;            // gate without panels where there is none
    const float *gate_bias, *up_bias;    // of all outputs, or null
    int32_t activation;
    const edgellm::Layer* layer = nullptr;  // whose gate and up adapters change; null: of experts, which none changes
    const float *gates = nullptr, *cutoffs = nullptr;  // [rows, outputs], what gate gave already; from which on they count
};

// x * sigmoid(t); t is x itself for SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x^3) for GELU as tanh has it
// (Hendrycks and Gimpel, arXiv:1606.08415).
inline Vec activated(Vec x, int activation) {
    Vec t = x;
    if (activation == edgellm::GELU_TANH)
        t = x * (splat(1.5957691216f) + splat(0.0713548163f) * x * x);
    if (activation == edgellm::CLAMPED_SWIGLU) t = splat(1.702f) * x;
    return x * sigmoid(t);
}

// activation(gate) * up. gpt-oss clamps both, and adds 1 to up; NaN stays NaN.
inline Vec gated(Vec gate, Vec up, int activation) {
    if (activation == edgellm::CLAMPED_SWIGLU) {
        const Vec limit = splat(7.0f);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        up += splat(1.0f);
    }
    return activated(gate, activation) * up;
}

inline void add_to(float* x, const float* y, size_t n) {
    for (size_t i = 0; i < n; i += LANES) store(x + i, load(x + i) + load(y + i));
}

// A row's mean and `deviations` of its standard deviations; `n` is a multiple of the widest vector.
inline float cutoff_of(const float* x, int n, float deviations) {
    Vec sum = {}, squares = {};
    for (int i = 0; i < n; i += LANES) sum += load(x + i);
    const float mean = sum_of(sum) / static_cast<float>(n);
    for (int i = 0; i < n; i += LANES) {
        const Vec d = load(x + i) - splat(mean);
        squares += d * d;
    }
    return mean + deviations * std::sqrt(sum_of(squares) / static_cast<float>(n));
}

// What numbers exceed a cutoff by; 0 where they do not.
inline void exceed(const float* x, float cutoff, size_t n, float* out) {
    for (size_t i = 0; i < n; i += LANES) {
        const Vec d = load(x + i) - splat(cutoff);
        store(out + i, d < Vec{} ? Vec{} : d);
    }
}

// Groups first .. end of activation(gate(x)) * up(x), quantized; two panels of gate and up make one group.
inline void activate_groups(const Mlp& mlp, int first, int end, const edgellm::Rows& x, int rows,
                            const edgellm::Rows& out, const Adapters& adapters = {}) {
    const size_t width = size_t(end - first) * edgellm::GROUP;
    float* gates = static_cast<float*>(edgellm::scratch(rows * width * 8));
    float* ups = gates + rows * width;
    const auto product = [&](const edgellm::Linear& linear, const float* bias, float* y, const Changed& changed) {
        multiply_panels(linear, 2 * first, 2 * end, x, rows, y, width, false);
        adapters.expand(changed, 2 * first, 2 * end, y, width);
        for (int r = 0; bias && r < rows; ++r) add_to(y + r * width, bias + size_t(first) * edgellm::GROUP, width);
    };
    const bool has_gate = mlp.gate.panels != nullptr;  // read once: a store of a vector may change all else
    const int activation = mlp.activation;
    if (mlp.gates)
        for (int r = 0; r < rows; ++r)
            exceed(mlp.gates + r * size_t(mlp.up.outputs) + size_t(first) * edgellm::GROUP, mlp.cutoffs[r], width,
                   gates + r * width);
    else if (has_gate)
        product(mlp.gate, mlp.gate_bias, gates, {mlp.layer, &edgellm::LayerChanges::gate, 0});
    product(mlp.up, mlp.up_bias, ups, {mlp.layer, &edgellm::LayerChanges::up, 1});
    for (int r = 0; r < rows; ++r) {
        float *y = gates + r * width, *factor = ups + r * width;
        for (size_t i = 0; i < width; i += LANES) {
            const Vec linear = load(factor + i);
            store(y + i, has_gate ? gated(load(y + i), linear, activation) : activated(linear, activation));
        }
        adapters.keep(r, y, first * edgellm::GROUP, static_cast<int>(width));
        quantize_groups(y, first, end, out, r, false);
    }
}
