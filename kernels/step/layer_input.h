// Embeddings of a token for each layer; included once for each instruction set.

// One row of activation(gate) * (norm(context / sqrt(hidden)) + sqrt(width) * table[row]) / sqrt(2), quantized. The
// norm's epsilon takes the division.
inline void activate_input(const edgellm::Transformer& model, const edgellm::Layer& layer, int table_row,
                           const float* gate, const float* context, const edgellm::Rows& out, int r) {
    const int width = model.layer_table.inputs;
    float* e = static_cast<float*>(edgellm::scratch(4 * size_t(width)));
    read_row(model.layer_table, table_row, e);
    const Vec inverse = splat(inverse_rms(context, width, model.epsilon * static_cast<float>(model.hidden)));
    const Vec scale = splat(std::sqrt(static_cast<float>(width))), half = splat(0.70710678f);
    for (int i = 0; i < width; i += LANES) {
        const Vec both = load(context + i) * inverse * load(model.layer_norm + i) + load(e + i) * scale;
        store(e + i, activated(load(gate + i), layer.activation) * (both * half));
    }
    quantize_groups(e, 0, width / edgellm::GROUP, out, r, false);
}
