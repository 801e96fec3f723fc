// Attention over latents (DeepSeek-V2, arXiv:2405.04434), in the form in which K and V of the heads are never made:
// a head's query goes through the matrix that makes its keys, and what it attends to through the one that makes its
// values. Included once for each instruction set.

// Quantized rows of all heads, those of one head behind those of another, each beginning with a cache line.
class HeadRows {
public:
    static size_t bytes(int heads, int rows, int width) { return heads * each(rows, width); }

    HeadRows(char* memory, int rows, int width) : memory_(memory), rows_(rows), width_(width) {}

    edgellm::Rows of(int head) const { return edgellm::Rows::in(memory_ + head * each(rows_, width_), rows_, width_); }

    void quantize(const float* x, int head, int row) const {
        quantize_groups(x, 0, width_ / edgellm::GROUP, of(head), row, false);
    }

private:
    static size_t each(int rows, int width) { return edgellm::Rows::bytes(rows, width) / 64 * 64; }

    char* memory_;
    int rows_, width_;
};

// Write a token's key, of which RoPE turns all, and its latent, which is normalized.
inline void append_latent(const edgellm::KV& kv, const edgellm::Rope& rope, const edgellm::Latent& latent, int layer,
                          int position, const float* k, const float* v) {
    const int widest = std::max(kv.head_dim, kv.latent);
    float* row = static_cast<float*>(edgellm::scratch(size_t(widest) * 5));
    int8_t* codes = reinterpret_cast<int8_t*>(row + widest);
    const size_t first = kv.first_row(position, layer, 0);
    rotate(rope, k, kv.head_dim, position, row);
    write_row(kv, true, row, first, position % edgellm::BLOCK, codes);
    scaled_norm(v, {latent.norm, nullptr}, kv.latent, latent.epsilon, row);
    write_row(kv, false, row, first, position % edgellm::BLOCK, codes);
}

// The queries, keys and latents of some tokens, of which RoPE turns the first numbers.
inline void append_latents(const edgellm::AppendLatentsCall& call) {
    const edgellm::KV& kv = call.kv;
    edgellm::Latent latent{};
    latent.norm = call.norm;
    latent.epsilon = call.epsilon;
    const size_t width = kv.key_dim();
    edgellm::parallel(call.tokens, call.threads, [&](int t) {
        const float* x = call.rows + size_t(t) * (call.heads + 1) * width;
        float* q = call.q + size_t(t) * call.heads * width;
        for (int h = 0; h < call.heads; ++h, x += width, q += width) {
            rotate(call.rope, x, kv.head_dim, call.start + t, q);
            std::memcpy(q + kv.head_dim, x + kv.head_dim, 4 * size_t(kv.latent));
        }
        append_latent(kv, call.rope, latent, call.layer, call.start + t, x, x + kv.head_dim);
    });
}
