// Chunk attention over KV blocks; included once for each instruction set.
//
// A task is one KV head, a run of query rows (see `RowOrder`) and a run of key splits. It walks over the key
// blocks once, four rows at a time, with the online softmax of FlashAttention (Dao et al., arXiv:2205.14135). On int8
// blocks both products are made of integers:
//
//     q = (254 code + fine code) * q_scale, 16 bits a row     score = q_scale * k_scale[j] * (q . k)
//     w = softmax weight * v_scale[j]        w = (128 high + low) * w_scale, 14 bits a row and block
//
// Seven bits are what the AVX2 and NEON instructions take as an unsigned factor; one term of them
// would lose the many small weights that share a block with a large one.

constexpr int TILE = 4;  // rows
#if LANES == 16
constexpr int COLUMNS = 2;  // vectors of keys beside each other in a tile of scores
#else
constexpr int COLUMNS = 1;
#endif

// What one row of a split, or of several, comes to: largest score, sum of weights, weighted values.
// In memory: maximum, total, values[value_dim].
inline void join(float* into, const float* part, int value_dim) {
    if (part[1] == 0) return;
    if (into[1] == 0) {
        std::memcpy(into, part, sizeof(float) * (value_dim + 2));
        return;
    }
    const float top = into[0] > part[0] ? into[0] : part[0];
    const float a = exp_negative(splat(into[0] - top))[0];
    const float b = exp_negative(splat(part[0] - top))[0];
    into[0] = top;
    into[1] = into[1] * a + part[1] * b;
    for (int d = 2; d < value_dim + 2; ++d) into[d] = into[d] * a + part[d] * b;
}

// The softmax of R rows over a block, the rows beside each other: scores [R, BLOCK] become weights, and
// `shrink` the factors by which what came before shrinks.
template <int R>
inline void soften(float* scores, int width, float* maximum, float* total, float* shrink) {
    Vec most[R], sum[R];
    unrolled<R>([&](int r) {
        most[r] = splat(maximum[r]);
        sum[r] = Vec{};
    });
    for (int j = 0; j < width; j += LANES)
        unrolled<R>([&](int r) { most[r] = larger(load(scores + r * edgellm::BLOCK + j), most[r]); });
    unrolled<R>([&](int r) {
        const float before = maximum[r], top = max_of(most[r]);
        shrink[r] = 1;
        if (top > before) shrink[r] = before == -INFINITY ? 0 : exp_negative(splat(before - top))[0];
        maximum[r] = top;
        most[r] = splat(top == -INFINITY ? 0 : top);  // a row without keys: all weights are 0
    });
    for (int j = 0; j < width; j += LANES)
        unrolled<R>([&](int r) {
            float* at = scores + r * edgellm::BLOCK + j;
            const Vec weight = exp_negative(load(at) - most[r]);
            sum[r] += weight;
            store(at, weight);
        });
    unrolled<R>([&](int r) { total[r] = total[r] * shrink[r] + sum_of(sum[r]); });
}

inline int padded(int width) { return (width + LANES - 1) / LANES * LANES; }

// The rows of a tile, at one block of keys.
struct TileState {
    float* scores;              // [TILE, BLOCK]
    float* values;              // [TILE, padded(value_dim)], weighted sums so far
    float shrink[TILE];
};

#include "int8_rows.h"
#include "sealed_rows.h"
#include "float_rows.h"

// Rows first .. first + rows of a KV head over key splits from .. to; `parts` [rows, value_dim + 2].
// `next` is where this thread will likely go on afterwards.
struct AttendTask {
    int layer, kv_head, first, rows, from, to;
    float* parts;
    edgellm::BlockPlace next;
    edgellm::BlockList chosen;  // blocks that all rows read; without any: those that they see
    edgellm::PanelLists lists;  // what rows of whole blocks of positions read
};

#include "best_blocks.h"
#include "heavy_panels.h"
#include "key_shares.h"

template <typename Rows>
class Walk {
public:
    Walk(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task)
        : kv_(kv), queries_(queries), task_(task), order_(queries.order(kv.kv_heads)),
          first_(queries.start + order_[task.first].token), step_(padded(kv.value_dim())),
          blocks_(task.chosen.count
                      ? task.chosen
                      : edgellm::blocks_seen(kv, position(task.rows - 1), task.layer, task.kv_head)),
          memory_(static_cast<char*>(edgellm::scratch(total_bytes()))),
          rows_(kv, memory_) {
        float* floats = reinterpret_cast<float*>(memory_ + (Rows::bytes(kv) + 63) / 64 * 64);
        maximum_ = floats;
        total_ = maximum_ + edgellm::ROWS_PER_TASK;
        scores_ = total_ + edgellm::ROWS_PER_TASK;
        part_ = scores_ + TILE * edgellm::BLOCK;
        values_ = part_ + edgellm::MAX_HEAD_DIM + 2 + 14;
    }

    void run() {
        for (int r = 0; r < task_.rows; ++r) {
            const auto [token, head] = order_[task_.first + r];
            const size_t at = size_t(token) * queries_.heads + task_.kv_head * order_.group + head;
            rows_.set_query(r, queries_.q + at * kv_.key_dim(), queries_.scale);
            task_.parts[size_t(r) * (kv_.value_dim() + 2) + 1] = 0;
        }
        for (int s = task_.from; s < std::min(task_.to, blocks_.splits()); ++s) split(s);
    }

private:
    size_t total_bytes() const {
        const size_t floats = 2 * edgellm::ROWS_PER_TASK + TILE * edgellm::BLOCK +
                              edgellm::MAX_HEAD_DIM + 16 + edgellm::ROWS_PER_TASK * size_t(step_);
        return Rows::bytes(kv_) + 64 + 4 * floats;
    }

    // Rows by head are those of one head.
    int position(int r) const {
        return order_.by_head ? first_ + r : queries_.start + (task_.first + r) / order_.group;
    }

    edgellm::BlockPlace place(int i) const {
        return kv_.place(blocks_[i] * edgellm::BLOCK, position(0), task_.layer, task_.kv_head);
    }

    void split(int s) {
        const int end = std::min((s + 1) * edgellm::SPLIT_BLOCKS, blocks_.count), keys = position(task_.rows - 1) + 1;
        for (int r = 0; r < task_.rows; ++r) {
            maximum_[r] = -INFINITY;
            total_[r] = 0;
        }
        std::memset(values_, 0, sizeof(float) * size_t(task_.rows) * step_);
        int i = s * edgellm::SPLIT_BLOCKS;
        if (queries_.window > 0) i = std::max(i, (position(0) + 1 - queries_.window) / edgellm::BLOCK);
        for (; i < end; ++i) {
            const int base = blocks_[i] * edgellm::BLOCK, count = std::min(edgellm::BLOCK, keys - base);
            const bool last = i + 1 == blocks_.count || (i + 1 == end && s + 1 == task_.to);
            if (blocks_.whole(i))
                rows_.open(place(i), last ? task_.next : place(i + 1), count);
            else if constexpr (std::is_same_v<Rows, Int8Rows>)
                rows_.gather(blocks_.panels + i * edgellm::PANELS, task_.layer, task_.kv_head);
            tiles<true>(0, std::min(TILE, task_.rows), base, count);
            tiles<false>(TILE, task_.rows, base, count);
        }
        for (int r = 0; r < task_.rows; ++r) {
            part_[0] = maximum_[r];
            part_[1] = total_[r];
            std::memcpy(part_ + 2, values_ + size_t(r) * step_, sizeof(float) * kv_.value_dim());
            join(task_.parts + size_t(r) * (kv_.value_dim() + 2), part_, kv_.value_dim());
        }
    }

    template <bool AHEAD>
    void tiles(int r, int end, int base, int count) {
        for (; r < end; r += TILE) {
            switch (end - r) {
                case 1: tile<1, AHEAD>(r, base, count); break;
                case 2: tile<2, AHEAD>(r, base, count); break;
                case 3: tile<3, AHEAD>(r, base, count); break;
                default: tile<4, AHEAD>(r, base, count);
            }
        }
    }

    template <int R, bool AHEAD>
    void tile(int r, int base, int count) {
        count = std::min(count, position(r + R - 1) + 1 - base);
        if (count <= 0) return;
        const int width = (count + LANES - 1) / LANES * LANES;
        rows_.template score<R, AHEAD>(r, width, scores_);
        if (queries_.softcap > 0)
            for (int i = 0; i < R; ++i) soft_cap(scores_ + i * edgellm::BLOCK, width, queries_.softcap);
        for (int i = 0; i < R; ++i) mask(r + i, base, width, scores_ + i * edgellm::BLOCK);
        TileState state{scores_, values_ + size_t(r) * step_, {}};
        soften<R>(scores_, width, maximum_ + r, total_ + r, state.shrink);
        rows_.template add<R, AHEAD>(state, count, width);
    }

    // Takes away the keys that row `r` does not see.
    void mask(int r, int base, int width, float* scores) const {
        const int end = position(r) + 1 - base;
        const int first = queries_.window > 0 ? std::min(width, end - queries_.window) : 0;
        for (int j = 0; j < first; ++j) scores[j] = -INFINITY;
        for (int j = std::max(0, end); j < width; ++j) scores[j] = -INFINITY;
    }

    const edgellm::KV& kv_;
    const edgellm::Queries& queries_;
    const AttendTask& task_;
    const edgellm::RowOrder order_;
    const int first_, step_;
    const edgellm::BlockList blocks_;
    char* memory_;
    Rows rows_;
    float *maximum_, *total_, *scores_, *part_, *values_;
};

// Rows that read the same blocks.
inline void attend_alike(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task) {
    if (edgellm::with_sealed_bits(kv.format, [&](auto key, auto value) {
            Walk<SealedRows<key(), value()>>(kv, queries, task).run();
        }))
        return;
    switch (kv.format) {
        case edgellm::F32: return Walk<FloatRows<float>>(kv, queries, task).run();
        case edgellm::F16: return Walk<FloatRows<uint16_t>>(kv, queries, task).run();
        default: return Walk<Int8Rows>(kv, queries, task).run();
    }
}

// Where blocks are sealed, left out or chosen, the rows of a block agree on which ones they read, and how.
inline void attend_rows(const edgellm::KV& kv, const edgellm::Queries& queries, const AttendTask& task) {
    const edgellm::RowOrder order = queries.order(kv.kv_heads);
    if (task.chosen.count || !(kv.seals() || kv.recent || order.by_head)) return attend_alike(kv, queries, task);
    for (int done = 0; done < task.rows;) {
        AttendTask part = task;
        part.first += done;
        const auto [token, head] = order[part.first];
        const int end = order.block_of(token).end;
        part.rows = std::min(task.rows - done, order.by_head ? end - token : end * order.group - part.first);
        part.parts += size_t(done) * (kv.value_dim() + 2);
        part.chosen = task.lists.read((queries.start + token) / edgellm::BLOCK, task.kv_head * order.group + head);
        attend_alike(kv, queries, part);
        done += part.rows;
    }
}

// A row's sums become its result, `out` [value_dim]; a head's sink takes part in the softmax alone.
inline void finish_row(const edgellm::KV& kv, const float* part, const float* sinks, int head, float* out) {
    const float total = part[1] + (sinks ? std::exp(sinks[head] - part[0]) : 0);
    for (int d = 0; d < kv.value_dim(); ++d) out[d] = part[2 + d] / total;
    if (kv.seals()) hadamard(out, kv.value_dim());
}

inline void attend(const edgellm::AttendCall& call) {
    const edgellm::Queries& queries = call.queries;
    const edgellm::RowOrder order = queries.order(call.kv.kv_heads);
    const int value_dim = call.kv.value_dim(), group = order.group, all = queries.tokens * group;
    const int run = queries.kv_read ? group : order.by_head ? edgellm::ROWS_BY_HEAD : edgellm::ROWS_PER_TASK;
    const int tasks = (all + run - 1) / run;
    const edgellm::BlockRange sparse = edgellm::sparse_blocks(queries.start, queries.tokens, queries.mass);
    edgellm::PanelLists lists{nullptr, edgellm::PanelLists::stride_for(sparse), queries.heads, sparse};
    std::vector<int32_t> chosen_panels(lists.count() * lists.stride);
    lists.lists = chosen_panels.data();
    edgellm::parallel(lists.count(), call.threads, [&](int index) {
        choose_panels(call.kv, queries, call.layer, index % queries.heads, sparse.from + index / queries.heads, lists);
    });
    edgellm::parallel(call.kv.kv_heads * tasks, call.threads, [&](int index) {
        static thread_local float parts[edgellm::ROWS_PER_TASK * (edgellm::MAX_HEAD_DIM + 2)];
        AttendTask task{call.layer, index / tasks, index % tasks * run, 0, 0, 0, parts, {}, {}, {}};
        task.lists = lists;
        task.next = {call.kv.first_row(0, call.layer, task.kv_head), false};
        task.rows = std::min(run, all - task.first);
        std::vector<int32_t> chosen(queries.kv_read / edgellm::BLOCK);
        if (queries.kv_read)
            task.chosen = choose_blocks(call.kv, queries, task,
                                        edgellm::sealed_blocks(queries.start + task.first / group), chosen.data());
        task.to = queries.kv_read ? task.chosen.splits() : edgellm::split_count(queries.start + queries.tokens);
        attend_rows(call.kv, queries, task);
        for (int r = 0; r < task.rows; ++r) {
            const auto [token, in_group] = order[task.first + r];
            const int head = task.kv_head * group + in_group;
            const float* part = parts + size_t(r) * (value_dim + 2);
            float* out = call.out + (size_t(token) * queries.heads + head) * value_dim;
            finish_row(call.kv, part, queries.sinks, head, out);
        }
    });
}
