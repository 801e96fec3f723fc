// The MLP of some rows, up to its second product; included once for each instruction set.

inline Vec sigmoid(Vec t) {
    const Vec e = exp_negative(-magnitude(t));
    return (t < Vec{} ? e : splat(1.0f)) / (splat(1.0f) + e);
}

// x * sigmoid(t); t is x itself for SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x^3) for GELU as tanh has it
// (Hendrycks and Gimpel, arXiv:1606.08415).
inline Vec activated(Vec x, int activation) {
    Vec t = x;
    if (activation == edgellm::GELU_TANH)
        t = x * (splat(1.5957691216f) + splat(0.0713548163f) * x * x);
    return x * sigmoid(t);
}

inline void add_to(float* x, const float* y, size_t n) {
    for (size_t i = 0; i < n; i += LANES) store(x + i, load(x + i) + load(y + i));
}

// Groups first .. end of activation(gate(x)) * up(x), quantized; two panels of gate and up make one group. `gate` and
// `up` are those of the layer, or of one of its experts.
inline void activate_groups(const edgellm::Layer& layer, const edgellm::Linear& gate, const edgellm::Linear& up,
                            int first, int end, const edgellm::Rows& x, int rows, const edgellm::Rows& out) {
    const size_t width = size_t(end - first) * edgellm::GROUP;
    float* gates = static_cast<float*>(edgellm::scratch(rows * width * 8));
    float* ups = gates + rows * width;
    const auto product = [&](const edgellm::Linear& linear, const float* bias, float* y) {
        multiply_panels(linear, 2 * first, 2 * end, x, rows, y, width, false);
        for (int r = 0; bias && r < rows; ++r) add_to(y + r * width, bias + size_t(first) * edgellm::GROUP, width);
    };
    const bool gated = layer.gated();  // read once: a store of a vector may change all else
    const int activation = layer.activation;
    if (gated) product(gate, layer.gate_bias, gates);
    product(up, layer.up_bias, ups);
    for (int r = 0; r < rows; ++r) {
        float *y = gates + r * width, *factor = ups + r * width;
        for (size_t i = 0; i < width; i += LANES) {
            const Vec linear = load(factor + i);
            store(y + i, gated ? activated(load(y + i), activation) * linear : activated(linear, activation));
        }
        quantize_groups(y, first, end, out, r, false);
    }
}
