// Native RoPE, quantization and append of one chunk: one pass over its rows.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../cpu/threads.h"

namespace {

constexpr int BLOCK = 128;
// Tokens of a task; a chunk smaller than two of them is not worth waking a thread for.
constexpr int TOKENS_PER_TASK = 32;

// Arguments of one call; the same fields, in the same order, as in native.py.
struct Call {
    void *k, *v;               // [blocks, layers, kv_heads, BLOCK, head_dim] int8 or float
    float *k_scale, *v_scale;  // [blocks, layers, kv_heads, BLOCK], null for float
    const int64_t* table;      // block ids of the sequence
    const float* qkv;          // [tokens, heads + 2 kv_heads, head_dim]
    const float *cos, *sin;    // [positions, half]
    float* q;                  // [tokens, heads, head_dim], the rotated queries
    int32_t layers, layer, kv_heads, heads, head_dim, half, tokens, start, threads;
};

void rotate(const Call& call, const float* x, int position, float* out) {
    const float* cos = call.cos + size_t(position) * call.half;
    const float* sin = call.sin + size_t(position) * call.half;
    for (int i = 0; i < call.half; ++i) {
        const float a = x[i], b = x[call.half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[call.half + i] = b * cos[i] + a * sin[i];
    }
    for (int i = 2 * call.half; i < call.head_dim; ++i) out[i] = x[i];
}

// To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no room for a fraction.
inline float nearest(float x) {
    const float shift = 12582912.0f;
    return (x + shift) - shift;
}

void write(const float* x, int head_dim, size_t row, void* target, float* scales) {
    if (scales == nullptr) {
        float* out = static_cast<float*>(target) + row * head_dim;
        for (int d = 0; d < head_dim; ++d) out[d] = x[d];
        return;
    }
    float largest = 0, broken = 0;
    for (int d = 0; d < head_dim; ++d) {
        const float size = std::fabs(x[d]);
        largest = size > largest ? size : largest;
        broken += size * 0;  // NaN if any value is NaN or infinite, so that the scale shows it
    }
    const float scale = largest * (1.0f / 127) + broken, inverse = scale > 0 ? 1 / scale : 0;
    int8_t* out = static_cast<int8_t*>(target) + row * head_dim;
    for (int d = 0; d < head_dim; ++d) {
        const float code = nearest(x[d] * inverse);
        out[d] = static_cast<int8_t>(code == code ? code : 0.0f);
    }
    scales[row] = scale;
}

void token(const Call& call, int t, float* rotated) {
    const int position = call.start + t;
    const float* x = call.qkv + size_t(t) * (call.heads + 2 * call.kv_heads) * call.head_dim;
    for (int h = 0; h < call.heads; ++h, x += call.head_dim)
        rotate(call, x, position, call.q + (size_t(t) * call.heads + h) * call.head_dim);
    const size_t record = size_t(call.table[position / BLOCK]) * call.layers + call.layer;
    for (int h = 0; h < 2 * call.kv_heads; ++h, x += call.head_dim) {
        const bool key = h < call.kv_heads;
        const int head = key ? h : h - call.kv_heads;
        const size_t row = (record * call.kv_heads + head) * BLOCK + position % BLOCK;
        if (key) rotate(call, x, position, rotated);
        write(key ? rotated : x, call.head_dim, row, key ? call.k : call.v,
              key ? call.k_scale : call.v_scale);
    }
}

}  // namespace

extern "C" void edgellm_append(const Call* call) {
    const int tasks = (call->tokens + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
    edgellm::parallel(tasks, call->threads, [&](int task) {
        std::vector<float> rotated(call->head_dim);
        const int end = (task + 1) * TOKENS_PER_TASK;
        for (int t = task * TOKENS_PER_TASK; t < end && t < call->tokens; ++t)
            token(*call, t, rotated.data());
    });
}
