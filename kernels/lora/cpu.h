// Changes that adapters make to linear layers; included once for each instruction set.
//
// A row's input is taken as it is before it is rounded. A row is computed alone in its adapter's matrices, up to ROWS
// of them at a time in the same order of sums, so its bits do not depend on the others.

constexpr int AHEAD = 4096;  // bytes that are fetched before they are needed

// RANKS rows of A, from `a`, times ROWS rows of x, and their scales: sums [ROWS][RANKS].
template <int ROWS>
inline void shrink_rows(const int8_t* a, int inputs, const float* scale, const float* x, size_t step, float* sums,
                        size_t sums_step) {
    using edgellm::PANEL, edgellm::RANKS;
    Vec sum[ROWS * RANKS] = {};
    for (int i = 0; i < inputs; i += PANEL) {
        const int8_t* here = a + size_t(i) * RANKS;
        __builtin_prefetch(here + AHEAD, 0, 2);
        for (int j = 0; j < PANEL; j += LANES)
            unrolled<RANKS>([&](int k) {
                const Vec codes = to_float(load_narrow(here + k * PANEL + j));
                unrolled<ROWS>([&](int r) {
                    Vec& total = sum[r * RANKS + k];
                    total = fused(codes, load(x + r * step + i + j), total);
                });
            });
    }
    for (int r = 0; r < ROWS; ++r)
        for (int k = 0; k < RANKS; ++k) sums[r * sums_step + k] = sum_of(sum[r * RANKS + k]) * scale[k];
}

// y += B sums for PANELS panels of outputs of ROWS rows.
template <int ROWS, int PANELS>
inline void expand_rows(const int8_t* b, int rank, const float* sums, size_t sums_step, float* y, size_t step) {
    using edgellm::PANEL;
    const size_t panel = size_t(rank) * PANEL;
    for (int j = 0; j < PANEL; j += LANES) {
        Vec sum[2][ROWS * PANELS] = {};  // of even ranks and odd ones
        for (int k = 0; k < rank; k += 2)
            unrolled<2>([&](int odd) {
                Vec codes[PANELS];
                unrolled<PANELS>([&](int p) {
                    codes[p] = to_float(load_narrow(b + p * panel + size_t(k + odd) * PANEL + j));
                });
                unrolled<ROWS>([&](int r) {
                    const Vec x = splat(sums[r * sums_step + k + odd]);
                    unrolled<PANELS>([&](int p) {
                        sum[odd][r * PANELS + p] = fused(codes[p], x, sum[odd][r * PANELS + p]);
                    });
                });
            });
        unrolled<ROWS>([&](int r) {
            unrolled<PANELS>([&](int p) {
                float* out = y + r * step + size_t(p) * PANEL + j;
                store(out, load(out) + (sum[0][r * PANELS + p] + sum[1][r * PANELS + p]));
            });
        });
    }
}

using ChangedPart = edgellm::LowRank edgellm::LayerChanges::*;

// A linear layer that adapters may change, and which of those with the same input it is.
struct Changed {
    const edgellm::Layer* layer = nullptr;  // null: adapters do not change it
    ChangedPart part = nullptr;
    int place = 0;
};

// Linear layers that adapters may change and that read the same rows, or each head of these by itself.
struct Readers {
    const edgellm::Layer* layer = nullptr;  // null: there are none
    int inputs = 0;
    std::array<ChangedPart, 5> parts{};
    int first = 0, heads = 1;  // the place of the first one

    int count() const { return static_cast<int>(std::find(parts.begin(), parts.end(), nullptr) - parts.begin()); }
    Changed of(ChangedPart part) const {
        const auto found = std::find(parts.begin(), parts.end(), part);
        if (!layer || found == parts.end()) return {};
        return {layer, part, first + static_cast<int>(found - parts.begin())};
    }
};

// Adapters of the rows of a step, with buffers that one linear layer after the other uses.
class Adapters {
public:
    Adapters() = default;

    // Cut buffers out of the workspace with `take(bytes)`, if a span has an adapter.
    template <typename Take>
    Adapters(const edgellm::StepCall& call, const Take& take)
        : layers_(call.model->layers), threads_(call.threads), of_row_(call.count) {
        int row = 0;
        for (int s = 0; s < call.span_count; ++s) {
            const edgellm::Span& span = call.spans[s];
            for (int r = span.adapter_start; span.adapter && r < span.rows; ++r) of_row_[row + r] = span.adapter;
            if (span.adapter) rank_ = std::max(rank_, span.adapter->rank);
            row += span.rows;
        }
        each_run(0, row, [&](const Run& run) { runs_.push_back(run); });
        if (runs_.empty()) return;
        width_ = call.model->hidden;
        for (int l = 0; l < call.model->layer_count; ++l) {
            const edgellm::Layer& layer = layers_[l];
            width_ = std::max({width_, layer.o.inputs, layer.beside_o.inputs, layer.shared.down.inputs});
            if (!layer.has_experts()) width_ = std::max(width_, layer.down.inputs);
            if (!layer.latent.there()) continue;
            const int most = std::max(layer.latent.key(), layer.latent.rank());
            width_ = std::max({width_, layer.latent.query_down.outputs, layer.heads * most});
            places_ = std::max(places_, layer.heads);
        }
        x_ = reinterpret_cast<float*>(take(4 * size_t(row) * width_));
        sums_ = reinterpret_cast<float*>(take(4 * size_t(row) * step()));
    }

    bool any() const { return !runs_.empty(); }

    // Phases of a layer that adapters need.
    int phases() const { return any() ? 2 : 0; }

    // Keep `n` numbers of a row's input, from number `first` on, if the row has an adapter.
    void keep(int row, const float* x, int first, int n) const {
        if (any() && of_row_[row]) std::memcpy(x_ + size_t(row) * width_ + first, x, 4 * size_t(n));
    }

    // A x of rows first .. end, which were kept.
    void shrink(int first, int end, const Readers& readers) const {
        if (!any() || !readers.layer) return;
        each_run(first, end, [&](const Run& run) {
            for (int p = 0; p < readers.count(); ++p)
                for (int head = 0; head < readers.heads; ++head)
                    shrink_run(run, readers, p, head, 0, change_of(run, readers.layer, readers.parts[p]).rank);
        });
    }

    // The same of all rows, as a phase of its own: for rows that are made some numbers at a time.
    void shrink(edgellm::Worker& worker, const Readers& readers) const {
        if (!any()) return;
        const int parts = readers.count(), all = rank_ / edgellm::RANKS;
        // few rows are shared out by ranks as well
        const int some = static_cast<int>(runs_.size()) * parts >= 8 * threads_ ? all : 1, blocks = all / some;
        worker.each(static_cast<int>(runs_.size()) * parts * blocks, [&](int item) {
            const Run& run = runs_[item / (parts * blocks)];
            const int part = item / blocks % parts, first = item % blocks * some * edgellm::RANKS;
            const int rank = change_of(run, readers.layer, readers.parts[part]).rank;
            shrink_run(run, readers, part, 0, first, std::min(rank, first + some * edgellm::RANKS));
        });
    }

    // y += B (A x) for panels first .. end of a linear layer, or of one head's part of it; y has those of all rows.
    void expand(const Changed& changed, int head, int first, int end, float* y, size_t row_step) const {
        if (!any() || !changed.layer) return;
        for (const Run& run : runs_) {
            const edgellm::LowRank& change = change_of(run, changed.layer, changed.part);
            const float* all = sums(run.row, changed.place + head);
            float* out = y + run.row * row_step;
            int panel = change.rank > 0 ? first : end;
            of_rows(run.rows, [&](auto rows) {
                const auto some = [&](auto panels) {
                    if constexpr (rows() * panels() <= ROWS)
                        for (; panel + panels() <= end; panel += panels())
                            expand_rows<rows(), panels()>(panel_of(change, head, panel), change.rank, all, step(),
                                                          out + size_t(panel - first) * edgellm::PANEL, row_step);
                };
                some(std::integral_constant<int, 4>{});
                some(std::integral_constant<int, 2>{});
                some(std::integral_constant<int, 1>{});
            });
        }
    }

    // The B of panels first .. end, of the first adapters; returns how many pieces these are.
    int pieces(const Changed& changed, int head, int first, int end, Later::Piece* out) const {
        int count = 0;
        if (!any() || !changed.layer) return count;
        for (const Run& run : runs_) {
            const edgellm::LowRank& change = change_of(run, changed.layer, changed.part);
            if (change.rank > 0 && count < Later::MOST)
                out[count++] = {panel_of(change, head, first), panel_of(change, head, end)};
        }
        return count;
    }

private:
    static constexpr int ROWS = 4;  // computed together

    // Rows with the same adapter, one behind the other.
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

    // Runs of rows first .. end.
    template <typename Body>
    void each_run(int first, int end, const Body& body) const {
        for (int r = first, rows; r < end; r += rows) {
            const edgellm::Adapter* adapter = of_row_[r];
            for (rows = 1; rows < ROWS && r + rows < end && of_row_[r + rows] == adapter;) ++rows;
            if (adapter) body(Run{adapter, r, rows});
        }
    }

    void shrink_run(const Run& run, const Readers& readers, int part, int head, int first, int end) const {
        const edgellm::LowRank& change = change_of(run, readers.layer, readers.parts[part]);
        const int inputs = readers.inputs;
        const float* x = x_ + size_t(run.row) * width_ + size_t(head) * inputs;
        for (int k = first; k < end; k += edgellm::RANKS) {
            const int8_t* a = change.a + size_t(head) * change.a_step + size_t(k) * inputs;
            const float* scale = change.scale + size_t(head) * change.scale_step + k;
            of_rows(run.rows, [&](auto rows) {
                shrink_rows<rows()>(a, inputs, scale, x, width_, sums(run.row, readers.first + part + head) + k,
                                    step());
            });
        }
    }

    const edgellm::LowRank& change_of(const Run& run, const edgellm::Layer* layer, ChangedPart part) const {
        return run.adapter->layers[layer - layers_].*part;
    }
    static const int8_t* panel_of(const edgellm::LowRank& change, int head, int panel) {
        return change.b + size_t(head) * change.b_step + size_t(panel) * change.rank * edgellm::PANEL;
    }
    size_t step() const { return size_t(places_) * rank_; }
    float* sums(int row, int place) const { return sums_ + row * step() + size_t(place) * rank_; }

    const edgellm::Layer* layers_ = nullptr;
    int threads_ = 1, rank_ = 0, width_ = 0, places_ = 5;
    std::vector<const edgellm::Adapter*> of_row_;  // or null
    std::vector<Run> runs_;
    float *x_ = nullptr, *sums_ = nullptr;  // [rows, width], [rows, places, rank]
};

// y (+)= x . panels first .. end of a linear layer, or of one head's part of it, with what adapters add.
inline void multiply_changed(const edgellm::Linear& linear, const Changed& changed, const Adapters& adapters, int first,
                             int end, const edgellm::Rows& x, int rows, float* y, size_t step, bool add, int head = 0) {
    Later::Piece pieces[Later::MOST];
    Later later{pieces, adapters.pieces(changed, head, first, end, pieces)};
    later.share_out((end - first) * (linear.inputs / edgellm::GROUP));
    multiply_panels(linear, first, end, x, rows, y, step, add, &later);
    adapters.expand(changed, head, first, end, y, step);
}
