// RoPE, quantization and append; included once for each instruction set.

inline void rotate(const edgellm::Rope& rope, const float* x, int head_dim, int position, float* out) {
    const float* cos = rope.cos + size_t(position) * rope.half;
    const float* sin = rope.sin + size_t(position) * rope.half;
    for (int i = 0; i < rope.half; ++i) {
        const float a = x[i], b = x[rope.half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[rope.half + i] = b * cos[i] + a * sin[i];
    }
    for (int i = 2 * rope.half; i < head_dim; ++i) out[i] = x[i];
}

// The heads of Q or K of one token, one after the other: normalized, and turned to a position.
class Heads {
public:
    // `weight` of their norm, or null.
    Heads(const edgellm::Rope& rope, const edgellm::HeadNorms& norms, const float* weight, const float* x,
          int heads, int head_dim, int position)
        : rope_(rope), norms_(norms), weight_(weight), x_(x), head_dim_(head_dim), position_(position) {
        if (weight && norms.whole) scale_ = inverse_rms(x, heads * head_dim, norms.epsilon);
    }

    void prepare(int head, float* out) const {
        const float* x = x_ + size_t(head) * head_dim_;
        if (weight_ && !norms_.after_rope) {
            normalize(x, head, out);
            x = out;
        }
        rotate(rope_, x, head_dim_, position_, out);
        if (weight_ && norms_.after_rope) normalize(out, head, out);
    }

private:
    void normalize(const float* x, int head, float* out) const {
        const float* weight = weight_ + (norms_.whole ? size_t(head) * head_dim_ : 0);
        const float scale = norms_.whole ? scale_ : inverse_rms(x, head_dim_, norms_.epsilon);
        for (int d = 0; d < head_dim_; ++d) out[d] = x[d] * scale * weight[d];
    }

    const edgellm::Rope& rope_;
    const edgellm::HeadNorms& norms_;
    const float *weight_, *x_;
    const int head_dim_, position_;
    float scale_ = 0;
};

// Write one row of bytes at its places in a block.
inline void write_bytes(const edgellm::KV& kv, bool key, const int8_t* codes, size_t first_row, int row) {
    const int width = key ? kv.head_dim : kv.value_dim();
    int8_t* out = static_cast<int8_t*>(key ? kv.k : kv.v) + first_row * width;
    if (key) {
        for (int d = 0; d < width; d += 4) std::memcpy(out + kv.key_place(row, d), codes + d, 4);
    } else {
        for (int d = 0; d < width; ++d) out[kv.value_place(row, d)] = codes[d];
    }
}

// Write one row of K or V; `codes` has room for as many bytes as it has numbers. `x` may
// be transformed in place.
inline void write_row(const edgellm::KV& kv, bool key, float* x, size_t first_row, int row,
                      int8_t* codes) {
    const int width = key ? kv.head_dim : kv.value_dim();
    const size_t base = first_row * width;
    const auto place = [&](int d) {
        return base + (key ? kv.key_place(row, d) : kv.value_place(row, d));
    };
    void* all = key ? kv.k : kv.v;
    if (kv.format == edgellm::F32) {
        for (int d = 0; d < width; ++d) static_cast<float*>(all)[place(d)] = x[d];
    } else if (kv.format == edgellm::F16) {
        for (int d = 0; d < width; ++d)
            static_cast<uint16_t*>(all)[place(d)] = half_of_float(x[d]);
    } else {
        if (key || kv.seals()) hadamard(x, width);
        (key ? kv.k_scale : kv.v_scale)[first_row + row] = quantize_row(x, width, codes).scale;
        write_bytes(kv, key, codes, first_row, row);
    }
}

// The queries of one token, [heads, head_dim]: normalized, and turned to its position.
inline void turn_queries(const edgellm::Rope& rope, const edgellm::HeadNorms& norms, int heads, int head_dim,
                         int position, const float* x, float* q) {
    const Heads queries(rope, norms, norms.q, x, heads, head_dim, position);
    for (int h = 0; h < heads; ++h) queries.prepare(h, q + size_t(h) * head_dim);
}

// One token: `qkv` is [heads + 2 kv_heads, head_dim]; the rotated queries go to `q`.
inline void append_token(const edgellm::KV& kv, const edgellm::Rope& rope, const edgellm::HeadNorms& norms,
                         int layer, int heads, int position, const float* qkv, float* q) {
    const int head_dim = kv.head_dim;
    turn_queries(rope, norms, heads, head_dim, position, qkv, q);
    float* row = static_cast<float*>(edgellm::scratch(size_t(head_dim) * 5));
    int8_t* codes = reinterpret_cast<int8_t*>(row + head_dim);
    qkv += size_t(heads) * head_dim;
    const Heads keys(rope, norms, norms.k, qkv, kv.kv_heads, head_dim, position);
    for (int h = 0; h < 2 * kv.kv_heads; ++h, qkv += head_dim) {
        const bool key = h < kv.kv_heads;
        const size_t first = kv.first_row(position, layer, key ? h : h - kv.kv_heads);
        if (key) {
            keys.prepare(h, row);
            if (kv.key_offset) {
                const float* offset = kv.key_offset + (size_t(layer) * kv.kv_heads + h) * head_dim;
                for (int d = 0; d < head_dim; ++d) row[d] -= offset[d];
            }
        } else {
            const float scale = norms.values ? inverse_rms(qkv, head_dim, norms.epsilon) : 1;
            for (int d = 0; d < head_dim; ++d) row[d] = qkv[d] * scale;
        }
        write_row(kv, key, row, first, position % edgellm::BLOCK, codes);
    }
}

inline void append(const edgellm::AppendCall& call) {
    const edgellm::KV& kv = call.kv;
    const int tasks = (call.tokens + edgellm::TOKENS_PER_TASK - 1) / edgellm::TOKENS_PER_TASK;
    edgellm::parallel(tasks, call.threads, [&](int task) {
        const int end = (task + 1) * edgellm::TOKENS_PER_TASK;
        for (int t = task * edgellm::TOKENS_PER_TASK; t < end && t < call.tokens; ++t) {
            const size_t width = size_t(call.heads) + (call.queries_alone ? 0 : 2 * kv.kv_heads);
            const float* qkv = call.qkv + t * width * kv.head_dim;
            float* q = call.q + size_t(t) * call.heads * kv.head_dim;
            if (call.queries_alone)
                turn_queries(call.rope, call.norms, call.heads, kv.head_dim, call.start + t, qkv, q);
            else
                append_token(kv, call.rope, call.norms, call.layer, call.heads, call.start + t, qkv, q);
        }
    });
}
