// Changes that adapters make to linear layers; included once for each instruction set.
//
// A row's input is taken as it is before it is rounded. A row is computed alone in its adapter's matrices, up to ROWS
// of them at a time in the same order of sums, so its bits do not depend on the others.

// The two bfloat16 of each lane.
struct Pairs {
    Vec low, high;
};
inline Pairs load_pairs(const uint32_t* p) {
    const IVec words = *reinterpret_cast<const IVec*>(p);
    return {(Vec)(words << 16), (Vec)(words & splat_int(static_cast<int32_t>(0xffff0000)))};
}

// RANKS rows of A, from `a`, times ROWS rows of x: sums [ROWS][RANKS].
template <int ROWS>
inline void shrink_rows(const uint32_t* a, int inputs, const float* x, size_t step, float* sums, size_t sums_step) {
    using edgellm::RANKS;
    Vec sum[ROWS * RANKS] = {};
    for (int i = 0; i < inputs; i += edgellm::GROUP)
        for (int j = i; j < i + edgellm::GROUP / 2; j += LANES)
            unrolled<RANKS>([&](int k) {
                const Pairs pairs = load_pairs(a + size_t(k) * (inputs / 2) + i / 2 + (j - i));
                unrolled<ROWS>([&](int r) {
                    Vec& total = sum[r * RANKS + k];
                    total = fused(pairs.low, load(x + r * step + j), total);
                    total = fused(pairs.high, load(x + r * step + j + edgellm::GROUP / 2), total);
                });
            });
    for (int r = 0; r < ROWS; ++r)
        for (int k = 0; k < RANKS; ++k) sums[r * sums_step + k] = sum_of(sum[r * RANKS + k]);
}

// y += B sums for one panel of outputs of ROWS rows.
template <int ROWS>
inline void expand_rows(const uint32_t* b, int rank, const float* sums, size_t sums_step, float* y, size_t step) {
    for (int j = 0; j < edgellm::PANEL; j += LANES) {
        Vec total[ROWS] = {};
        for (int k = 0; k < rank; k += 2) {
            const Pairs pairs = load_pairs(b + size_t(k / 2) * edgellm::PANEL + j);
            unrolled<ROWS>([&](int r) {
                total[r] = fused(pairs.low, splat(sums[r * sums_step + k]), total[r]);
                total[r] = fused(pairs.high, splat(sums[r * sums_step + k + 1]), total[r]);
            });
        }
        unrolled<ROWS>([&](int r) { store(y + r * step + j, load(y + r * step + j) + total[r]); });
    }
}

// A linear layer that adapters may change, and which of those with the same input it is.
struct Changed {
    const edgellm::Layer* layer = nullptr;  // null: adapters do not change it
    edgellm::LowRank edgellm::LayerChanges::*part = nullptr;
    int place = 0;
};

// Adapters of the rows of a step, with buffers that one linear layer after the other uses.
class Adapters {
public:
    Adapters() = default;

    // Cut buffers out of the workspace with `take(bytes)`, if a span has an adapter.
    template <typename Take>
    Adapters(const edgellm::StepCall& call, const Take& take) : layers_(call.model->layers), threads_(call.threads) {
        int row = 0;
        for (int s = 0; s < call.span_count; ++s) {
            const edgellm::Span& span = call.spans[s];
            for (int r = span.adapter_start; span.adapter && r < span.rows; r += ROWS)
                runs_.push_back({span.adapter, row + r, std::min(ROWS, span.rows - r)});
            if (span.adapter) rank_ = std::max(rank_, span.adapter->rank);
            row += span.rows;
        }
        if (runs_.empty()) return;
        with_.resize(row);
        for (const Run& run : runs_) std::fill_n(with_.begin() + run.row, run.rows, true);
        width_ = call.model->hidden;
        for (int l = 0; l < call.model->layer_count; ++l) {
            const edgellm::Layer& layer = layers_[l];
            width_ = std::max(width_, layer.o.inputs);
            if (!layer.has_experts()) width_ = std::max(width_, layer.down.inputs);
        }
        x_ = reinterpret_cast<float*>(take(4 * size_t(row) * width_));
        sums_ = reinterpret_cast<float*>(take(4 * size_t(row) * PLACES * rank_));
    }

    bool any() const { return !runs_.empty(); }

    // Phases of a layer that adapters need.
    int phases() const { return any() ? 4 : 0; }

    // Keep `n` numbers of a row's input, from number `first` on, if the row has an adapter.
    void keep(int row, const float* x, int first, int n) const {
        if (any() && with_[row]) std::memcpy(x_ + size_t(row) * width_ + first, x, 4 * size_t(n));
    }

    // A x for linear layers that take the rows that were kept.
    void shrink(edgellm::Worker& worker, std::initializer_list<Changed> changed, int inputs) const {
        if (!any() || !changed.begin()->layer) return;
        const int parts = static_cast<int>(changed.size()), all = rank_ / edgellm::RANKS;
        // few rows are shared out by ranks as well
        const int some = static_cast<int>(runs_.size()) * parts >= 8 * threads_ ? all : 1, blocks = all / some;
        worker.each(static_cast<int>(runs_.size()) * parts * blocks, [&](int item) {
            const Run& run = runs_[item / (parts * blocks)];
            const Changed& each = changed.begin()[item / blocks % parts];
            const edgellm::LowRank& change = change_of(run, each);
            const int first = item % blocks * some * edgellm::RANKS;
            const int end = std::min(change.rank, first + some * edgellm::RANKS);
            for (int k = first; k < end; k += edgellm::RANKS) {
                const uint32_t* a = change.a + size_t(k) * (inputs / 2);
                const float* x = x_ + size_t(run.row) * width_;
                of_rows(run.rows, [&](auto rows) {
                    shrink_rows<rows()>(a, inputs, x, width_, sums(run.row, each.place) + k, step());
                });
            }
        });
    }

    // y += B (A x) for panels first .. end of a linear layer; y has those of all rows.
    void expand(const Changed& changed, int first, int end, float* y, size_t row_step) const {
        if (!any() || !changed.layer) return;
        for (const Run& run : runs_) {
            const edgellm::LowRank& change = change_of(run, changed);
            for (int panel = first; change.rank > 0 && panel < end; ++panel) {
                const uint32_t* b = change.b + size_t(panel) * (change.rank / 2) * edgellm::PANEL;
                float* out = y + run.row * row_step + size_t(panel - first) * edgellm::PANEL;
                of_rows(run.rows, [&](auto rows) {
                    expand_rows<rows()>(b, change.rank, sums(run.row, changed.place), step(), out, row_step);
                });
            }
        }
    }

private:
    static constexpr int ROWS = 4;    // computed together
    static constexpr int PLACES = 4;  // linear layers with the same input

    // Rows of one span, one behind the other.
    struct Run {
        const edgellm::Adapter* adapter;
        int row, rows;
    };

    template <typename Body>
    static void of_rows(int rows, const Body& body) {
        switch (rows) {
            case 1: return body(std::integral_constant<int, 1>{});
            case 2: return body(std::integral_constant<int, 2>{});
            case 3: return body(std::integral_constant<int, 3>{});
            default: return body(std::integral_constant<int, ROWS>{});
        }
    }

    const edgellm::LowRank& change_of(const Run& run, const Changed& changed) const {
        return run.adapter->layers[changed.layer - layers_].*changed.part;
    }
    size_t step() const { return size_t(PLACES) * rank_; }
    float* sums(int row, int place) const { return sums_ + row * step() + size_t(place) * rank_; }

    const edgellm::Layer* layers_ = nullptr;
    int threads_ = 1, rank_ = 0, width_ = 0;
    std::vector<Run> runs_;
    std::vector<char> with_;  // whether each row has an adapter
    float *x_ = nullptr, *sums_ = nullptr;  // [rows, width], [rows, PLACES, rank]
};
