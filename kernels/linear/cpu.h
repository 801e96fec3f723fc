// Products of int8 activations with int4 or int8 panels; included once for each instruction set.
//
// Everything inside a group of 32 is an integer, so a row's result does not depend on how many rows
// are computed together. Where 8 bits of activations are too few, a second product takes what the first
// one rounded off.

// Rows that are computed together: as many as the sums find registers for, of a panel as it lies in
// memory and of two unpacked ones.
constexpr int MAX_ROWS = 4;
#if LANES == 16 || defined(EDGELLM_NEON)
constexpr int WIDE_ROWS = 6;
#else
constexpr int WIDE_ROWS = 3;
#endif
constexpr int WIDE_PANELS = 2;
constexpr int MANY_ROWS = MAX_ROWS + 1;  // from which on unpacking pays
constexpr int PANELS_AT_ONCE = 8;        // that are handed out for many rows
constexpr int STRETCH = 24;              // groups; with two panels 30 KB of unpacked codes and scales
constexpr size_t RUN_BYTES = 32 << 10;   // of weights that are handed out at a time for few rows

template <int N>
using Count = std::integral_constant<int, N>;

// Quantize groups first .. end of a row; `x` begins at the first of them.
inline void quantize_groups(const float* x, int first, int end, const edgellm::Rows& rows, size_t row,
                            bool fine) {
    for (int g = first; g < end; ++g, x += edgellm::GROUP) {
        const size_t at = row * rows.width + size_t(g) * edgellm::GROUP;
        edgellm::Group& group = rows.groups[at / edgellm::GROUP];
        int8_t* codes = rows.codes + at;
        const RowScale found = quantize_row(x, edgellm::GROUP, codes);
        group.scale = found.scale;
        group.start[0] = ZERO + START * found.total;
        group.start[1] = ZERO - 8 * found.total;
        group.shift[0] = group.scale * static_cast<float>(found.total);
        if (!fine) continue;
        const int32_t rest = quantize_rest(x, edgellm::GROUP, group.scale, codes, rows.fine + at);
        group.fine_start[0] = START * rest;
        group.fine_start[1] = -8 * rest;
        const int32_t all = found.total * FINE_STEPS + rest;
        group.shift[1] = group.scale * (static_cast<float>(all) / FINE_STEPS);
    }
}

// What the sums of a row and group start from.
template <int KIND>
inline IVec group_start(const edgellm::Group& group) {
    if (KIND == edgellm::INT4_AFFINE) return splat_int(ZERO);
    return splat_int(group.start[KIND == edgellm::INT8_SYMMETRIC ? 0 : 1]);
}
template <int KIND>
inline IVec fine_start(const edgellm::Group& group) {
    if (KIND == edgellm::INT4_AFFINE) return IVec{};
    return splat_int(group.fine_start[KIND == edgellm::INT8_SYMMETRIC ? 0 : 1]);
}

// A panel as it lies in memory.
template <int KIND>
struct Packed {
    static constexpr int PANELS = 1, ROWS = MAX_ROWS, panels = 1;
    const uint8_t* panel;

    const uint8_t* group(int g) const { return panel + g * edgellm::group_bytes(KIND); }

    // Add the products of one group with ROWS rows of codes to `dots`.
    template <int ROWS>
    void dot_group(int g, int lane, const int8_t* codes, size_t width, IVec (*all)[ROWS]) const {
        IVec* dots = *all;
        const uint8_t* from = group(g) + 4 * lane;
        if (KIND == edgellm::INT8_SYMMETRIC) {
            for (int i = 0; i < 8; ++i) {
                const Bytes weight = operand(load_bytes(from + 64 * i));
                for (int r = 0; r < ROWS; ++r)
                    dots[r] = dot_signed(dots[r], weight, splat_quad(codes + r * width + 4 * i));
            }
            return;
        }
        for (int i = 0; i < 4; ++i) {
            const Bytes both = load_bytes(from + 64 * i);
            const Bytes low = both & 15, high = (Bytes)((IVec)both >> 4) & 15;
            for (int r = 0; r < ROWS; ++r) {
                const int8_t* quad = codes + r * width + 4 * i;
                dots[r] = dot(dots[r], low, splat_quad(quad));
                dots[r] = dot(dots[r], high, splat_quad(quad + 16));
            }
        }
    }
    const uint16_t* halves(int g, int lane) const {
        const int codes = KIND == edgellm::INT8_SYMMETRIC ? 512 : 256;
        return reinterpret_cast<const uint16_t*>(group(g) + codes) + lane;
    }
    Vec scale(int, int g, int lane) const { return load_halves(halves(g, lane)); }
    Vec offset(int, int g, int lane) const { return load_halves(halves(g, lane) + edgellm::PANEL); }
};

// A group of a panel with a byte for each code, ready to be multiplied.
struct alignas(64) Unpacked {
    int8_t codes[edgellm::GROUP * edgellm::PANEL];
    float scale[edgellm::PANEL], offset[edgellm::PANEL];
};

// A stretch of two panels that many rows share: unpacking is done once, and a row's codes are loaded
// once for both.
template <int KIND>
struct Shared {
    static constexpr int PANELS = WIDE_PANELS, ROWS = WIDE_ROWS;
    Unpacked* groups;  // [PANELS, STRETCH]
    int panels;        // that are kept

    static void fill(Unpacked* groups, const Packed<KIND>& packed, int first, int count) {
        for (int g = 0; g < count; ++g) {
            const uint8_t* from = packed.group(first + g);
            int8_t* to = groups[g].codes;
            const auto put = [](int8_t* p, Bytes b) { *reinterpret_cast<Bytes*>(p) = b; };
            for (int i = 0; i < 64; i += 4 * LANES) {
                for (int quad = 0; quad < (KIND == edgellm::INT8_SYMMETRIC ? 8 : 4); ++quad) {
                    const Bytes codes = load_bytes(from + 64 * quad + i);
                    if (KIND == edgellm::INT8_SYMMETRIC) {
                        put(to + 64 * quad + i, operand(codes));
                    } else {
                        put(to + 64 * quad + i, codes & 15);
                        put(to + 64 * (quad + 4) + i, (Bytes)((IVec)codes >> 4) & 15);
                    }
                }
            }
            for (int lane = 0; lane < edgellm::PANEL; lane += LANES) {
                store(groups[g].scale + lane, packed.scale(0, first + g, lane));
                if (KIND == edgellm::INT4_AFFINE)
                    store(groups[g].offset + lane, packed.offset(0, first + g, lane));
            }
        }
    }
    template <int ROWS>
    void dot_group(int g, int lane, const int8_t* codes, size_t width, IVec (*dots)[ROWS]) const {
        for (int i = 0; i < 8; ++i) {
            Bytes weights[PANELS];
            for (int p = 0; p < PANELS; ++p)
                weights[p] = load_bytes(groups[p * STRETCH + g].codes + 64 * i + 4 * lane);
            for (int r = 0; r < ROWS; ++r) {
                const Bytes quad = splat_quad(codes + r * width + 4 * i);
                for (int p = 0; p < PANELS; ++p)
                    dots[p][r] = KIND == edgellm::INT8_SYMMETRIC ? dot_signed(dots[p][r], weights[p], quad)
                                                                 : dot(dots[p][r], weights[p], quad);
            }
        }
    }
    Vec scale(int p, int g, int lane) const { return load(groups[p * STRETCH + g].scale + lane); }
    Vec offset(int p, int g, int lane) const { return load(groups[p * STRETCH + g].offset + lane); }
};

// y[r, 0 .. 16 PANELS) (+)= x[r] . panels, over `groups` groups from the first of x and of the weights
template <int ROWS, int KIND, bool FINE, typename Weights>
inline void panel_rows(const Weights& weights, int groups, const edgellm::Rows& x, float* y, size_t step,
                       bool add) {
    constexpr int PANELS = Weights::PANELS;
    const size_t row_groups = x.width / edgellm::GROUP;
    for (int lane = 0; lane < edgellm::PANEL; lane += LANES) {
        Vec sum[PANELS][ROWS];
        for (int p = 0; p < PANELS; ++p)
            for (int r = 0; r < ROWS; ++r)
                sum[p][r] =
                    add && p < weights.panels ? load(y + r * step + p * edgellm::PANEL + lane) : Vec{};
        for (int g = 0; g < groups; ++g) {
            const edgellm::Group* group = x.groups + g;
            const size_t at = size_t(g) * edgellm::GROUP;
            IVec dots[PANELS][ROWS];
            for (int p = 0; p < PANELS; ++p)
                for (int r = 0; r < ROWS; ++r) dots[p][r] = group_start<KIND>(group[r * row_groups]);
            weights.template dot_group<ROWS>(g, lane, x.codes + at, x.width, dots);
            if (FINE) {
                for (int p = 0; p < PANELS; ++p)
                    for (int r = 0; r < ROWS; ++r)
                        dots[p][r] =
                            (dots[p][r] - ZERO) * FINE_STEPS + fine_start<KIND>(group[r * row_groups]);
                weights.template dot_group<ROWS>(g, lane, x.fine + at, x.width, dots);
            }
            for (int p = 0; p < PANELS; ++p) {
                const Vec scale = weights.scale(p, g, lane) * splat(FINE ? 1.0f / FINE_STEPS : 1.0f);
                const Vec zero = zero_scaled(scale);
                for (int r = 0; r < ROWS; ++r)
                    sum[p][r] += (FINE ? to_float(dots[p][r]) * scale : scaled(dots[p][r], scale, zero)) *
                                 splat(group[r * row_groups].scale);
                if (KIND != edgellm::INT4_AFFINE) continue;
                const Vec offset = weights.offset(p, g, lane);
                for (int r = 0; r < ROWS; ++r)
                    sum[p][r] += offset * splat(group[r * row_groups].shift[FINE]);
            }
        }
        for (int p = 0; p < weights.panels; ++p)
            for (int r = 0; r < ROWS; ++r) store(y + r * step + p * edgellm::PANEL + lane, sum[p][r]);
    }
}

template <int KIND, bool FINE, typename Weights>
inline void all_rows(const Weights& weights, int groups, const edgellm::Rows& x, int rows, float* y,
                     size_t step, bool add) {
    int done = 0;
    const auto run = [&](auto count) {
        constexpr int N = decltype(count)::value;
        for (; done + N <= rows; done += N)
            panel_rows<N, KIND, FINE>(weights, groups, x.from(done), y + done * step, step, add);
    };
    run(Count<Weights::ROWS>{});
    if (Weights::ROWS > 4) run(Count<4>{});
    if (Weights::ROWS == 4) run(Count<3>{});
    run(Count<2>{});
    run(Count<1>{});
}

// Panels first .. end for many rows: a stretch of two panels at a time stays in the first cache while all
// rows pass by.
template <int KIND, bool FINE>
inline void many_rows(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x, int rows,
                      float* y, size_t step, bool add) {
    Unpacked unpacked[WIDE_PANELS * STRETCH];
    const int groups = x.width / edgellm::GROUP, parts = (groups + STRETCH - 1) / STRETCH;
    const int stretch = (groups + parts - 1) / parts;
    for (int g = 0; g < groups; g += stretch) {
        const int count = std::min(stretch, groups - g);
        for (int p = first; p < end; p += WIDE_PANELS) {
            for (int i = 0; i < WIDE_PANELS; ++i)  // without a second one the first again
                Shared<KIND>::fill(unpacked + i * STRETCH, {linear.panel(std::min(p + i, end - 1))}, g,
                                   count);
            all_rows<KIND, FINE>(Shared<KIND>{unpacked, std::min(WIDE_PANELS, end - p)}, count,
                                 x.from_group(g), rows, y + size_t(p - first) * edgellm::PANEL, step,
                                 add || g > 0);
        }
    }
}

template <int KIND, bool FINE>
inline void some_panels(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x, int rows,
                        float* y, size_t step, bool add) {
    const bool many = rows >= MANY_ROWS;
    const int width = many ? PANELS_AT_ONCE : 1;
    for (int p = first; p < end; p += width, y += size_t(width) * edgellm::PANEL) {
        if (many)
            many_rows<KIND, FINE>(linear, p, std::min(end, p + width), x, rows, y, step, add);
        else
            all_rows<KIND, FINE>(Packed<KIND>{linear.panel(p)}, x.width / edgellm::GROUP, x, rows, y, step,
                                 add);
    }
}

template <int KIND>
inline void panels_of(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x, int rows,
                      float* y, size_t step, bool add) {
    const int fine = std::max(first, std::min(end, linear.first_fine()));
    some_panels<KIND, false>(linear, first, fine, x, rows, y, step, add);
    y += size_t(fine - first) * edgellm::PANEL;
    some_panels<KIND, true>(linear, fine, end, x, rows, y, step, add);
}

// y[0 .. rows, 0 .. 16 (end - first)) (+)= x . panels first .. end of the layer, y with `step` floats a row.
inline void multiply_panels(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x,
                            int rows, float* y, size_t step, bool add) {
    switch (linear.kind) {
        case edgellm::INT8_SYMMETRIC:
            return panels_of<edgellm::INT8_SYMMETRIC>(linear, first, end, x, rows, y, step, add);
        case edgellm::INT4_AFFINE:
            return panels_of<edgellm::INT4_AFFINE>(linear, first, end, x, rows, y, step, add);
        default: return panels_of<edgellm::INT4_SYMMETRIC>(linear, first, end, x, rows, y, step, add);
    }
}

// Panels that are handed out at a time: some for every thread, none too small to be worth it.
inline int panels_at_once(const edgellm::Linear& linear, int rows, int threads) {
    const int each = linear.count() / (4 * threads) + 1;
    if (rows >= MANY_ROWS)  // in pairs, or one of each two would be thrown away
        return std::min(PANELS_AT_ONCE, (each + WIDE_PANELS - 1) / WIDE_PANELS * WIDE_PANELS);
    return std::min(static_cast<int>(RUN_BYTES / (linear.panel_bytes() * rows) + 1), each);
}

inline void linear(const edgellm::LinearCall& call) {
    const int inputs = call.linear.inputs;
    const size_t step = size_t(call.linear.count()) * edgellm::PANEL;
    char* memory = static_cast<char*>(edgellm::scratch(edgellm::Rows::bytes(call.rows, inputs)));
    const edgellm::Rows x = edgellm::Rows::in(memory, call.rows, inputs);
    for (int r = 0; r < call.rows; ++r)
        quantize_groups(call.x + size_t(r) * inputs, 0, inputs / edgellm::GROUP, x, r,
                        call.linear.any_fine());
    const int panels = call.linear.count(), run = panels_at_once(call.linear, call.rows, call.threads);
    edgellm::parallel((panels + run - 1) / run, call.threads, [&](int item) {
        const int first = item * run;
        multiply_panels(call.linear, first, std::min(panels, first + run), x, call.rows,
                        call.y + size_t(first) * edgellm::PANEL, step, false);
    });
}
