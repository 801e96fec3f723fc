// Products of int8 activations with int4 or int8 panels; included once for each instruction set.
//
// Everything inside a group of 32 is an integer, so a row's result does not depend on how many rows
// are computed together. Where 8 bits of activations are too few, a second product takes what the first
// one rounded off.

#if LANES == 16
constexpr int MAX_ROWS = 12;  // rows that share the unpacked codes of a group
#else
constexpr int MAX_ROWS = 4;
#endif

// Quantize groups first .. end of a row; `x` begins at the first of them.
inline void quantize_groups(const float* x, int first, int end, const edgellm::Rows& rows, size_t row,
                            bool fine) {
    for (int g = first; g < end; ++g, x += edgellm::GROUP) {
        const size_t at = row * rows.width + size_t(g) * edgellm::GROUP;
        edgellm::Group& group = rows.groups[at / edgellm::GROUP];
        int8_t* codes = rows.codes + at;
        const RowScale found = quantize_row(x, edgellm::GROUP, codes);
        group.scale = found.scale;
        group.start[0] = START * found.total;
        group.start[1] = -8 * found.total;
        group.shift[0] = group.scale * static_cast<float>(found.total);
        if (!fine) continue;
        const int32_t rest = quantize_rest(x, edgellm::GROUP, group.scale, codes, rows.fine + at);
        group.fine_start[0] = START * rest;
        group.fine_start[1] = -8 * rest;
        const int32_t all = found.total * FINE_STEPS + rest;
        group.shift[1] = group.scale * (static_cast<float>(all) / FINE_STEPS);
    }
}

template <int KIND>
inline IVec group_start(const int32_t* start) {
    if (KIND == edgellm::INT4_AFFINE) return IVec{};
    return splat_int(start[KIND == edgellm::INT8_SYMMETRIC ? 0 : 1]);
}

// Add the products of one group with ROWS rows of codes to `dots`.
template <int ROWS, int KIND>
inline void dot_group(const uint8_t* group, const int8_t* codes, int width, IVec* dots) {
    if (KIND == edgellm::INT8_SYMMETRIC) {
        for (int i = 0; i < 8; ++i) {
            const Bytes weight = operand(load_bytes(group + 64 * i));
            for (int r = 0; r < ROWS; ++r)
                dots[r] = dot_signed(dots[r], weight, splat_quad(codes + r * width + 4 * i));
        }
        return;
    }
    for (int i = 0; i < 4; ++i) {
        const Bytes both = load_bytes(group + 64 * i);
        const Bytes low = both & 15, high = (Bytes)((IVec)both >> 4) & 15;
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* quad = codes + r * width + 4 * i;
            dots[r] = dot(dots[r], low, splat_quad(quad));
            dots[r] = dot(dots[r], high, splat_quad(quad + 16));
        }
    }
}

// y[r, 0 .. 16) (+)= x[r] . panel
template <int ROWS, int KIND, bool FINE>
inline void panel_rows(const uint8_t* panel, const edgellm::Rows& x, float* y, size_t step, bool add) {
    constexpr size_t BYTES = edgellm::group_bytes(KIND);
    constexpr int CODES = KIND == edgellm::INT8_SYMMETRIC ? 512 : 256;
    const int groups = x.width / edgellm::GROUP;
    for (int lane = 0; lane < edgellm::PANEL; lane += LANES) {
        Vec sum[ROWS];
        for (int r = 0; r < ROWS; ++r) sum[r] = add ? load(y + r * step + lane) : Vec{};
        for (int g = 0; g < groups; ++g) {
            const uint8_t* weights = panel + g * BYTES;
            const edgellm::Group* group = x.groups + g;
            const size_t at = size_t(g) * edgellm::GROUP;
            IVec dots[ROWS];
            for (int r = 0; r < ROWS; ++r) dots[r] = group_start<KIND>(group[r * groups].start);
            dot_group<ROWS, KIND>(weights + 4 * lane, x.codes + at, x.width, dots);
            if (FINE) {
                IVec rest[ROWS];
                for (int r = 0; r < ROWS; ++r) rest[r] = group_start<KIND>(group[r * groups].fine_start);
                dot_group<ROWS, KIND>(weights + 4 * lane, x.fine + at, x.width, rest);
                for (int r = 0; r < ROWS; ++r) dots[r] = dots[r] * FINE_STEPS + rest[r];
            }
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(weights + CODES) + lane;
            const Vec scale = load_halves(halves) * splat(FINE ? 1.0f / FINE_STEPS : 1.0f);
            for (int r = 0; r < ROWS; ++r)
                sum[r] += to_float(dots[r]) * scale * splat(group[r * groups].scale);
            if (KIND == edgellm::INT4_AFFINE) {
                const Vec offset = load_halves(halves + edgellm::PANEL);
                for (int r = 0; r < ROWS; ++r) sum[r] += offset * splat(group[r * groups].shift[FINE]);
            }
        }
        for (int r = 0; r < ROWS; ++r) store(y + r * step + lane, sum[r]);
    }
}

template <int KIND, bool FINE>
inline void panel_kind(const uint8_t* panel, const edgellm::Rows& x, int rows, float* y, size_t step,
                       bool add) {
    int r = 0;
    for (; r + MAX_ROWS <= rows; r += MAX_ROWS)
        panel_rows<MAX_ROWS, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
    if (MAX_ROWS > 8 && r + 8 <= rows) {
        panel_rows<8, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
        r += 8;
    }
    if (MAX_ROWS > 4 && r + 4 <= rows) {
        panel_rows<4, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
        r += 4;
    }
    switch (rows - r) {
        case 1: return panel_rows<1, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
        case 2: return panel_rows<2, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
        case 3: return panel_rows<3, KIND, FINE>(panel, x.from(r), y + r * step, step, add);
    }
}

template <int KIND>
inline void panel_precision(const edgellm::Linear& linear, int index, const edgellm::Rows& x, int rows,
                            float* y, size_t step, bool add) {
    const uint8_t* panel = linear.panel(index);
    if (linear.fine(index)) return panel_kind<KIND, true>(panel, x, rows, y, step, add);
    panel_kind<KIND, false>(panel, x, rows, y, step, add);
}

// y[0 .. rows, 0 .. 16) (+)= x . panel `index` of the layer, y with `step` floats a row.
inline void multiply_panel(const edgellm::Linear& linear, int index, const edgellm::Rows& x, int rows,
                           float* y, size_t step, bool add) {
    switch (linear.kind) {
        case edgellm::INT8_SYMMETRIC:
            return panel_precision<edgellm::INT8_SYMMETRIC>(linear, index, x, rows, y, step, add);
        case edgellm::INT4_AFFINE:
            return panel_precision<edgellm::INT4_AFFINE>(linear, index, x, rows, y, step, add);
        default: return panel_precision<edgellm::INT4_SYMMETRIC>(linear, index, x, rows, y, step, add);
    }
}

inline void linear(const edgellm::LinearCall& call) {
    const int inputs = call.linear.inputs;
    const size_t step = size_t(call.linear.count()) * edgellm::PANEL;
    char* memory = static_cast<char*>(edgellm::scratch(edgellm::Rows::bytes(call.rows, inputs)));
    const edgellm::Rows x = edgellm::Rows::in(memory, call.rows, inputs);
    for (int r = 0; r < call.rows; ++r)
        quantize_groups(call.x + size_t(r) * inputs, 0, inputs / edgellm::GROUP, x, r,
                        call.linear.any_fine());
    edgellm::parallel(call.linear.count(), call.threads, [&](int index) {
        multiply_panel(call.linear, index, x, call.rows, call.y + index * edgellm::PANEL, step, false);
    });
}
