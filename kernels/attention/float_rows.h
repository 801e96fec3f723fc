// Query rows against float blocks (see cpu.h); included once for each instruction set.

inline float number(float x) { return x; }
inline float number(uint16_t x) { return float_of_half(x); }

// Blocks of float32 or, as uint16_t, of float16: made float32 and turned around block by block.
template <typename T>
class FloatRows {
public:
    static size_t bytes(const edgellm::KV& kv) {
        const size_t wide = padded(kv.key_dim()) + padded(kv.value_dim());
        return 4 * (edgellm::ROWS_PER_TASK * size_t(kv.key_dim()) + edgellm::BLOCK * wide);
    }

    FloatRows(const edgellm::KV& kv, char* memory) : kv_(kv), key_dim_(kv.key_dim()), value_dim_(kv.value_dim()) {
        keys_ = reinterpret_cast<float*>(memory);
        values_ = keys_ + size_t(edgellm::BLOCK) * padded(key_dim_);
        queries_ = values_ + size_t(edgellm::BLOCK) * padded(value_dim_);
    }

    void set_query(int r, const float* q, float norm) {
        for (int d = 0; d < key_dim_; ++d) queries_[size_t(r) * key_dim_ + d] = q[d] * norm;
    }

    void open(const edgellm::BlockPlace& here, const edgellm::BlockPlace&, int count) {
        const T* k = static_cast<const T*>(kv_.k) + here.row * kv_.head_dim;
        const T* v = static_cast<const T*>(kv_.v) + here.row * value_dim_;
        const int step = padded(value_dim_);
        for (int d = 0; d < kv_.head_dim; ++d)
            for (int j = 0; j < count; ++j) keys_[d * edgellm::BLOCK + j] = number(k[kv_.key_place(j, d)]);
        for (int d = 0; d < value_dim_; ++d)
            for (int j = 0; j < count; ++j) values_[j * step + d] = number(v[kv_.value_place(j, d)]);
        for (int d = kv_.head_dim; d < key_dim_; ++d)
            for (int j = 0; j < count; ++j) keys_[d * edgellm::BLOCK + j] = values_[j * step + d - kv_.head_dim];
        for (int d = 0; d < key_dim_; ++d)
            std::memset(keys_ + d * edgellm::BLOCK + count, 0, 4 * (edgellm::BLOCK - count));
    }

    template <int R, bool>
    void score(int first, int width, float* scores) const {
        for (int j = 0; j < width; j += LANES) {
            Vec sum[R] = {};
            for (int d = 0; d < key_dim_; ++d) {
                const Vec key = load(keys_ + d * edgellm::BLOCK + j);
                for (int r = 0; r < R; ++r)
                    sum[r] += splat(queries_[size_t(first + r) * key_dim_ + d]) * key;
            }
            for (int r = 0; r < R; ++r) store(scores + r * edgellm::BLOCK + j, sum[r]);
        }
    }

    template <int R, bool>
    void add(TileState& tile, int count, int) {
        const int step = padded(value_dim_);
        for (int d = 0; d < value_dim_; d += LANES) {
            Vec sum[R];
            for (int r = 0; r < R; ++r)
                sum[r] = load(tile.values + r * step + d) * splat(tile.shrink[r]);
            for (int j = 0; j < count; ++j) {
                const Vec value = load(values_ + j * step + d);
                for (int r = 0; r < R; ++r)
                    sum[r] += splat(tile.scores[r * edgellm::BLOCK + j]) * value;
            }
            for (int r = 0; r < R; ++r) store(tile.values + r * step + d, sum[r]);
        }
    }

private:
    const edgellm::KV& kv_;
    const int key_dim_, value_dim_;
    float *keys_, *values_, *queries_;
};
