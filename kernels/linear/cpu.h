// Products of int8 activations with panels; included once for each instruction set.
//
// Everything inside a group of 32, or 16, is an integer, so a row's result does not depend on how many
// rows are computed together. Where 8 bits of activations are too few, a second product takes what the
// first one rounded off.

constexpr int PANELS_AT_ONCE = 8;        // that are handed out for many rows
constexpr size_t RUN_BYTES = 128 << 10;  // of weights that are handed out at a time for few rows

template <int N>
using Count = std::integral_constant<int, N>;

// What sums of products of a group start from, see ZERO: of signed codes, of codes 0 .. 15 around 8 and of codes
// 0 .. 31 around 16; then of each half of a group of codes 0 .. 63 around 32.
inline void set_starts(int32_t zero, int32_t total, int32_t first_half, int32_t* start) {
    start[0] = zero + START * total;
    start[1] = zero - 8 * total;
    start[2] = zero - 16 * total;
    start[3] = zero - 32 * first_half;
    start[4] = zero - 32 * (total - first_half);
}

// Quantize groups first .. end of a row; `x` begins at the first of them.
inline void quantize_groups(const float* x, int first, int end, const edgellm::Rows& rows, int row, bool fine) {
    const auto first_half = [](const int8_t* codes) {
        int32_t sum = 0;
        for (int i = 0; i < edgellm::GROUP / 2; ++i) sum += codes[i];
        return sum;
    };
    for (int g = first; g < end; ++g, x += edgellm::GROUP) {
        const size_t at = rows.at(row, g);
        int8_t* codes = rows.codes + at * edgellm::GROUP;
        const auto [scale, total] = quantize_row(x, edgellm::GROUP, codes);
        edgellm::RowGroup& group = rows.groups[at];
        group.scale = scale;
        group.shift = scale * static_cast<float>(total);
        set_starts(ZERO, total, first_half(codes), group.start);
        if (!fine) continue;
        int8_t* finer = rows.fine + at * edgellm::GROUP;
        const int32_t rest = quantize_rest(x, edgellm::GROUP, scale, codes, finer);
        edgellm::RowGroup& with_fine = rows.fine_groups[at];
        with_fine.scale = scale;
        with_fine.shift = scale * (static_cast<float>(total * FINE_STEPS + rest) / FINE_STEPS);
        set_starts(0, rest, first_half(finer), with_fine.start);
    }
}

// What the sums of a row and group start from; those of affine codes start from nothing, because their
// offsets are added for all numbers of a group at once.
template <int ARITHMETIC>
inline IVec group_start(const edgellm::RowGroup& group, int start, int part, int32_t zero) {
    if (ARITHMETIC == UNSIGNED_AFFINE) return splat_int(zero);
    return splat_int(group.start[ARITHMETIC == HALVES ? 3 + part : is_signed(ARITHMETIC) ? 0 : start]);
}

// y[r, 0 .. 16 PANELS) (+)= x[row + r] . panels, over `groups` groups from the first of the weights, `from` of x
template <int ROWS, bool FINE, typename Weights>
inline void panel_rows(const Weights& weights, int groups, const edgellm::Rows& x, int row, int from, float* y,
                       size_t step, bool add) {
    constexpr int PANELS = Weights::PANELS, ARITHMETIC = Weights::ARITHMETIC;
    constexpr int PARTS = parts_of(ARITHMETIC);
    const size_t beside = x.beside(row);
    for (int lane = 0; lane < edgellm::PANEL; lane += LANES) {
        Vec sum[PANELS][ROWS];
        for (int p = 0; p < PANELS; ++p)
            for (int r = 0; r < ROWS; ++r)
                sum[p][r] =
                    add && p < weights.panels ? load(y + r * step + p * edgellm::PANEL + lane) : Vec{};
        size_t at = x.at(row, from);
        for (int g = 0; g < groups; ++g, at += beside) {
            IVec dots[PANELS][PARTS][ROWS];
            const auto each = [&](const auto& body) {
                for (int p = 0; p < PANELS; ++p)
                    for (int part = 0; part < PARTS; ++part)
                        for (int r = 0; r < ROWS; ++r) body(dots[p][part][r], at + r, part);
            };
            each([&](IVec& dot, size_t i, int part) {
                dot = group_start<ARITHMETIC>(x.groups[i], weights.start, part, ZERO);
            });
            if (lane == 0) weights.fetch_ahead(g);
            weights.template dot_group<ROWS>(g, lane, x.codes + at * edgellm::GROUP, dots);
            if (FINE) {
                each([&](IVec& dot, size_t i, int part) {
                    dot = (dot - ZERO) * FINE_STEPS +
                          group_start<ARITHMETIC>(x.fine_groups[i], weights.start, part, 0);
                });
                weights.template dot_group<ROWS>(g, lane, x.fine + at * edgellm::GROUP, dots);
            }
            // Rows outside: what is broadcast of a row needs a register for its own sums alone. The other way GCC keeps
            // the sums in memory, and a prompt of 512 takes 3 % longer (AMD EPYC, Zen 4).
            for (int r = 0; r < ROWS; ++r) {
                const edgellm::RowGroup& group = (FINE ? x.fine_groups : x.groups)[at + r];
                const Vec row_scale = splat(group.scale), row_shift = splat(group.shift);
                for (int p = 0; p < PANELS; ++p) {
                    for (int part = 0; part < PARTS; ++part) {
                        const Vec scale = weights.scale(p, g, lane, part) * splat(FINE ? 1.0f / FINE_STEPS : 1.0f);
                        const IVec dot = dots[p][part][r];
                        sum[p][r] += (FINE ? to_float(dot) * scale : scaled(dot, scale, zero_scaled(scale))) * row_scale;
                    }
                    if (is_affine(ARITHMETIC)) sum[p][r] += weights.offset(p, g, lane) * row_shift;
                }
            }
        }
        for (int p = 0; p < PANELS; ++p) {  // known to the compiler: it keeps the sums in registers
            if (p >= weights.panels) break;
            for (int r = 0; r < ROWS; ++r) store(y + r * step + p * edgellm::PANEL + lane, sum[p][r]);
        }
    }
}

template <bool FINE, typename Weights>
inline void all_rows(const Weights& weights, int groups, const edgellm::Rows& x, int rows, int from, float* y,
                     size_t step, bool add) {
    constexpr int MOST = Weights::ROWS;
    for (int done = 0; done < rows;) {
        const int end = std::min(rows, done + edgellm::ROW_BLOCK);
        const auto run = [&](auto count) {
            constexpr int N = decltype(count)::value;
            for (; done + N <= end; done += N)
                panel_rows<N, FINE>(weights, groups, x, done, from, y + done * step, step, add);
        };
        run(Count<MOST>{});
        if constexpr (MOST > 4) run(Count<4>{});
        if constexpr (MOST % 4 == 0) run(Count<3>{});
        if constexpr (MOST > 1) run(Count<2>{});
        run(Count<1>{});
    }
}

// One panel for few rows: a tile of it stays in the first cache while they pass by, MAX_ROWS at a time.
template <int KIND, bool FINE>
inline void few_rows(const Packed<KIND>& panel, const edgellm::Rows& x, int rows, float* y, size_t step,
                     bool add) {
    const int groups = x.width / edgellm::GROUP;
    const int tile = rows > Packed<KIND>::ROWS ? FEW_TILE : groups;
    for (int g = 0; g < groups; g += tile)
        all_rows<FINE>(Packed<KIND>{panel.block(g), panel.later}, std::min(tile, groups - g), x, rows, g, y, step,
                       add || g > 0);
}

#ifdef EDGELLM_TILES
#include "tiles.h"
#else
constexpr int TILES_FROM = 0, TILE_GROUPS = 1;
constexpr bool goes_by_tiles(int, bool) { return false; }
template <bool AFFINE>  // not called
void all_rows_by_tiles(const Unpacked*, int, int, const edgellm::Rows&, int, int, float*, size_t, bool);
#endif

// Panels first .. end for many rows: a tile of two panels at a time stays in the first cache while all
// rows pass by, and the next one comes meanwhile.
template <int KIND, bool FINE, bool TILES>
inline void many_rows(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x, int rows,
                      float* y, size_t step, bool add) {
    using Wide = Shared<arithmetic(KIND)>;
    Unpacked unpacked[WIDE_PANELS * K_TILE];
    constexpr int MOST = TILES ? TILE_GROUPS : K_TILE;
    const int groups = x.width / edgellm::GROUP, parts = (groups + MOST - 1) / MOST;
    const int tile = (groups + parts - 1) / parts;
    for (int g = 0; g < groups; g += tile) {
        const int count = std::min(tile, groups - g);
        for (int p = first; p < end; p += WIDE_PANELS) {
            const bool last = p + WIDE_PANELS >= end;
            for (int i = 0; i < WIDE_PANELS; ++i) {
                const Packed<KIND> next{linear.panel((last ? first : p + WIDE_PANELS) + i)};
                for (int h = 0; h < count; ++h) next.fetch((last ? g + tile : g) + h);
                // without a second one the first again
                Wide::template fill<TILES>(unpacked + i * K_TILE,
                                           Packed<KIND>{linear.panel(std::min(p + i, end - 1))}, g, count);
            }
            const int panels = std::min(WIDE_PANELS, end - p);
            float* out = y + size_t(p - first) * edgellm::PANEL;
            if constexpr (TILES)
                all_rows_by_tiles<is_affine(arithmetic(KIND))>(unpacked, panels, count, x, rows, g, out, step,
                                                               add || g > 0);
            else
                all_rows<FINE>(Wide{unpacked, panels, start_of(KIND)}, count, x, rows, g, out, step,
                               add || g > 0);
        }
    }
}

template <int KIND, bool FINE>
inline void panels_of(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x, int rows,
                      float* y, size_t step, bool add, Later* later) {
    constexpr bool TILES = goes_by_tiles(KIND, FINE);
    const bool many = rows > few_rows_of(KIND);
    const bool tiles = TILES && rows >= TILES_FROM && edgellm::current_isa() == edgellm::Isa::AMX;
    const int width = many ? PANELS_AT_ONCE : 1;
    for (int p = first; p < end; p += width, y += size_t(width) * edgellm::PANEL) {
        const int last = std::min(end, p + width);
        if (tiles)
            many_rows<KIND, FINE, TILES>(linear, p, last, x, rows, y, step, add);
        else if (many)
            many_rows<KIND, FINE, false>(linear, p, last, x, rows, y, step, add);
        else
            few_rows<KIND, FINE>(Packed<KIND>{linear.panel(p), later}, x, rows, y, step, add);
    }
}

template <int KIND>
inline void panels_of_kind(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x,
                           int rows, float* y, size_t step, bool add, Later* later) {
    if (linear.fine)
        panels_of<KIND, true>(linear, first, end, x, rows, y, step, add, later);
    else
        panels_of<KIND, false>(linear, first, end, x, rows, y, step, add, later);
}

// Call `body` with the kind as a constant.
template <typename Body>
inline void with_kind(int kind, const Body& body) {
    switch (kind) {
        case edgellm::INT4_SYMMETRIC: return body(Count<edgellm::INT4_SYMMETRIC>{});
        case edgellm::INT4_AFFINE: return body(Count<edgellm::INT4_AFFINE>{});
        case edgellm::INT8_SYMMETRIC: return body(Count<edgellm::INT8_SYMMETRIC>{});
        case edgellm::INT8_AFFINE: return body(Count<edgellm::INT8_AFFINE>{});
        case edgellm::INT5_SYMMETRIC: return body(Count<edgellm::INT5_SYMMETRIC>{});
        case edgellm::INT5_AFFINE: return body(Count<edgellm::INT5_AFFINE>{});
        case edgellm::INT4_K: return body(Count<edgellm::INT4_K>{});
        case edgellm::INT5_K: return body(Count<edgellm::INT5_K>{});
        case edgellm::INT6_K: return body(Count<edgellm::INT6_K>{});
        case edgellm::IQ4_NL: return body(Count<edgellm::IQ4_NL>{});
        case edgellm::IQ4_XS: return body(Count<edgellm::IQ4_XS>{});
        default: return body(Count<edgellm::MXFP4>{});
    }
}

// y[0 .. rows, 0 .. 16 (end - first)) (+)= x . panels first .. end of the layer, y with `step` floats a row. `later`:
// what to fetch meanwhile for few rows, or null.
inline void multiply_panels(const edgellm::Linear& linear, int first, int end, const edgellm::Rows& x,
                            int rows, float* y, size_t step, bool add, Later* later = nullptr) {
    with_kind(linear.kind, [&](auto kind) {
        panels_of_kind<decltype(kind)::value>(linear, first, end, x, rows, y, step, add, later);
    });
}

// One output's weights, [inputs].
inline void read_row(const edgellm::Linear& linear, int row, float* out) {
    const uint8_t* panel = linear.panel(row / edgellm::PANEL);
    const int lane = row % edgellm::PANEL, vector = lane / LANES * LANES, place = lane % LANES;
    with_kind(linear.kind, [&](auto kind) {
        constexpr int KIND = decltype(kind)::value;
        const Packed<KIND> packed{panel};
        for (int g = 0; g < linear.inputs / edgellm::GROUP; ++g) {
            const Codes<KIND> codes = packed.codes(g, vector);
            const float offset = is_affine(arithmetic(KIND)) ? packed.offset(0, g, vector)[place] : 0;
            for (int part = 0; part < 2; ++part) {
                const float scale =
                    packed.scale(0, g, vector, part * (parts_of(arithmetic(KIND)) - 1))[place];
                for (int i = 0; i < 4; ++i, out += 4) {
                    Bytes pair[2];
                    codes.pair(i, pair[0], pair[1]);
                    for (int j = 0; j < 4; ++j)
                        out[j] = value_of<KIND>(pair[part][4 * place + j]) * scale + offset;
                }
            }
        }
    });
}

// Panels that are handed out at a time: some for every thread, none too small to be worth it.
inline int panels_at_once(const edgellm::Linear& linear, int rows, int threads) {
    const int each = linear.count() / (4 * threads) + 1;
    if (rows > few_rows_of(linear.kind))  // in pairs, or one of each two would be thrown away
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
                        call.linear.fine);
    const int panels = call.linear.count(), run = panels_at_once(call.linear, call.rows, call.threads);
    edgellm::parallel((panels + run - 1) / run, call.threads, [&](int item) {
        const int first = item * run;
        multiply_panels(call.linear, first, std::min(panels, first + run), x, call.rows,
                        call.y + size_t(first) * edgellm::PANEL, step, false);
    });
}
