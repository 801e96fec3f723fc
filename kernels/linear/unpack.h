// Panels as products read them: as they lie in memory, or unpacked to a byte per code; included once for each
// instruction set.

// Rows that are computed together: as many as the sums find registers for, of a panel as it lies in
// memory and of two unpacked ones. For 8 and 16 rows 8 at a time give 1.3 times the speed of 4 (Intel Xeon,
// Sapphire Rapids).
#if LANES == 16
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 4;
#endif
#if LANES == 16 || defined(EDGELLM_NEON)
constexpr int WIDE_ROWS = 6;
#else
constexpr int WIDE_ROWS = 3;
#endif
constexpr int WIDE_PANELS = 2;

// Kinds that few files have are unpacked from two rows on: to compile them for more takes 40 s.
constexpr bool is_rare(int kind) {
    return kind == edgellm::INT8_AFFINE || kind == edgellm::INT5_AFFINE || kind == edgellm::INT5_K ||
           edgellm::TRAITS[kind].table;
}

// Up to so many rows read a panel as it lies in memory, MAX_ROWS at a time. To write an unpacked tile and
// read it again pays later: 16 rows of int4 took 57 ns a group from memory and 86 unpacked, 8 rows 31 and
// 62 (one core of an AMD EPYC, Zen 4).
constexpr int few_rows_of(int kind) { return is_rare(kind) ? 1 : 16; }

// Groups of a panel that stay in the first cache while its rows pass by; whole blocks.
constexpr int FEW_TILE = 2 * edgellm::BLOCK_GROUPS;
constexpr int K_TILE = 24;  // groups; with two panels 34 KB of unpacked codes and scales
// A core's own prefetcher stops at the end of a page, and a page is read in less time than the next one
// takes to come: so far ahead, one core read int4 weights at 0.9 of the rate of a plain read, and at
// 0.67 without (Intel Xeon, Sapphire Rapids, 400 MB). What is fetched stops in the second cache, as the
// first one waits for few lines at a time: 20 GB/s against 13.6 (Zen 4).
constexpr size_t BYTES_AHEAD = 8 << 10;

// What is computed with codes: kinds that differ only in how they are written share it.
enum Arithmetic { UNSIGNED, UNSIGNED_AFFINE, SIGNED, SIGNED_AFFINE, HALVES };
constexpr Arithmetic arithmetic(int kind) {
    const edgellm::Traits f = edgellm::TRAITS[kind];
    if (f.parts == 2) return HALVES;
    if (f.bits == 8) return f.affine ? SIGNED_AFFINE : SIGNED;
    return f.table ? SIGNED : f.affine ? UNSIGNED_AFFINE : UNSIGNED;
}
constexpr bool is_affine(int a) { return a == UNSIGNED_AFFINE || a == SIGNED_AFFINE; }
constexpr bool is_signed(int a) { return a == SIGNED || a == SIGNED_AFFINE; }
constexpr int parts_of(int a) { return a == HALVES ? 2 : 1; }
// Which start the sums of UNSIGNED codes have.
constexpr int start_of(int kind) { return edgellm::TRAITS[kind].bits == 5 ? 2 : 1; }

// The code that stands for 0 where codes are unsigned and not affine.
constexpr int zero_of(int kind) { return arithmetic(kind) == HALVES ? 32 : start_of(kind) == 2 ? 16 : 8; }

// Of the products of a group, the weights' codes first. Those of 4 bits settle as often as those of 5, twice a group: once, with
// all eight quads written out, was slower (Zen 3).
template <int ARITHMETIC>
using Sum = std::conditional_t<is_signed(ARITHMETIC), SignedSum, CodeSum<ARITHMETIC == HALVES ? 63 : 31>>;

// The codes of one group, for LANES outputs from one on: two quads at a time, i and i + 4.
template <int KIND>
struct Codes {
    static constexpr edgellm::Traits TRAITS = edgellm::TRAITS[KIND];
    const uint8_t* from;
    Bytes high[2];  // what codes have above 4 bits

    explicit Codes(const uint8_t* group) : from(group) {
        if (TRAITS.bits == 5 || TRAITS.bits == 6) high[0] = load_bytes(from + 256);
        if (TRAITS.bits == 6) high[1] = load_bytes(from + 320);
    }
    // ready to be multiplied
    void pair(int i, Bytes& low, Bytes& top) const {
        const Bytes both = load_bytes(from + 64 * i);
        if (TRAITS.bits == 8) {
            low = operand(both);
            top = operand(load_bytes(from + 64 * (i + 4)));
            return;
        }
        low = both & 15;
        top = (Bytes)((IVec)both >> 4) & 15;
        if (TRAITS.bits == 5) {
            low |= (Bytes)((IVec)high[0] << (4 - i)) & 16;
            top |= (Bytes)((IVec)high[0] >> i) & 16;
        }
        if (TRAITS.bits == 6) {
            low |= field(high[0], i);
            top |= field(high[1], i);
        }
        if (TRAITS.table) {
            low = lookup(table(), low);
            top = lookup(table(), top);
        }
    }

private:
    static Bytes field(Bytes bits, int i) {
        return (Bytes)(i < 2 ? (IVec)bits << (4 - 2 * i) : (IVec)bits >> (2 * i - 4)) & 48;
    }
    static const int8_t* table() { return KIND == edgellm::MXFP4 ? E2M1 : IQ4; }
};

// What a code stands for that is ready to be multiplied, before it is scaled.
template <int KIND>
inline float value_of(int8_t code) {
    if (is_signed(arithmetic(KIND))) return operand(Bytes{} + code)[0];
    if (arithmetic(KIND) == UNSIGNED_AFFINE) return code;
    return code - zero_of(KIND);
}

// Memory in some pieces that is needed behind a product, and is fetched with its groups, some lines with each. One core
// read 39 MB of adapters in 6 ms behind products of 12, in 2.5 where it had fetched them so, and in 6 where it had
// fetched them all before a product (AMD EPYC, Zen 4).
struct Later {
    static constexpr int MOST = 16;
    struct Piece {
        const int8_t *at, *end;
    };
    Piece* pieces;
    int count, lines = 0;  // lines: with each group

    void share_out(int groups) {
        size_t bytes = 0;
        for (int i = 0; i < count; ++i) bytes += pieces[i].end - pieces[i].at;
        lines = static_cast<int>((bytes / 64 + groups - 1) / groups);
    }
    void fetch() {
        for (int i = 0; i < lines && count > 0; ++i) {
            __builtin_prefetch(pieces->at, 0, 2);
            if ((pieces->at += 64) >= pieces->end) ++pieces, --count;
        }
    }
};

// A panel as it lies in memory.
template <int KIND>
struct Packed {
    static constexpr edgellm::Traits TRAITS = edgellm::TRAITS[KIND];
    static constexpr int ARITHMETIC = arithmetic(KIND), PANELS = 1, panels = 1;
    static constexpr int ROWS = is_rare(KIND) ? 1 : MAX_ROWS;
    static constexpr int start = start_of(KIND);
    const uint8_t* panel;
    Later* later = nullptr;

    const uint8_t* block(int g) const {
        constexpr size_t bytes =
            edgellm::block_bytes(KIND) + edgellm::BLOCK_GROUPS * edgellm::group_bytes(KIND);
        return panel + g / edgellm::BLOCK_GROUPS * bytes;
    }
    const uint8_t* group(int g) const {
        if (!TRAITS.blocked) return panel + g * edgellm::group_bytes(KIND);
        return block(g) + edgellm::block_bytes(KIND) +
               g % edgellm::BLOCK_GROUPS * edgellm::group_bytes(KIND);
    }
    Codes<KIND> codes(int g, int lane) const { return Codes<KIND>(group(g) + 4 * lane); }

    // A group, and what lies before it: of the first one of a block that is what all of it share. A line
    // that is left out costs 9 ns a group.
    void fetch(int g, size_t ahead = 0) const {
        const uint8_t* from = group(g) - edgellm::block_bytes(KIND) + ahead;
        for (size_t i = 0; i < edgellm::block_bytes(KIND) + edgellm::group_bytes(KIND); i += 64)
            __builtin_prefetch(from + i, 0, 2);
    }
    void fetch_ahead(int g) const {
        fetch(g, BYTES_AHEAD);
        if (later) later->fetch();
    }

    // Add the products of one group with ROWS rows of codes to `dots`.
    template <int ROWS>
    EDGELLM_INLINED void dot_group(int g, int lane, const int8_t* x, IVec (*all)[parts_of(ARITHMETIC)][ROWS]) const {
        IVec(&dots)[parts_of(ARITHMETIC)][ROWS] = *all;
        const Codes<KIND> packed = codes(g, lane);
        constexpr int PARTS = parts_of(ARITHMETIC);
        Sum<ARITHMETIC> sums[PARTS][ROWS];
        unrolled<PARTS>([&](int part) EDGELLM_INLINED {
            unrolled<ROWS>([&](int r) EDGELLM_INLINED { sums[part][r] = Sum<ARITHMETIC>(dots[part][r]); });
        });
        unrolled<4>([&](int i) EDGELLM_INLINED {
            Bytes low, top;
            packed.pair(i, low, top);
            unrolled<ROWS>([&](int r) EDGELLM_INLINED {
                const int8_t* quad = x + r * edgellm::GROUP + 4 * i;
                sums[0][r].add(low, splat_quad(quad));
                sums[PARTS - 1][r].add(top, splat_quad(quad + 16));
            });
            // one sum adds twice a turn, two sums once each
            if ((i + 1) * (3 - PARTS) % Sum<ARITHMETIC>::LIMIT == 0) settle(sums);
        });
        unrolled<PARTS>([&](int part) EDGELLM_INLINED {
            unrolled<ROWS>([&](int r) EDGELLM_INLINED { dots[part][r] = sums[part][r].sum(); });
        });
    }
    // The number `index` of LANES scales and offsets of a group.
    Vec factor(int g, int lane, int index) const {
        const uint8_t* from = group(g) + 64 * TRAITS.bits;
        if (TRAITS.blocked) return to_float(load_narrow(from + edgellm::PANEL * index + lane));
        return load_halves(reinterpret_cast<const uint16_t*>(from) + edgellm::PANEL * index + lane);
    }
    Vec scale(int, int g, int lane, int part) const {
        const Vec scale = factor(g, lane, part);
        if (!TRAITS.blocked) return scale;
        return scale * load_halves(reinterpret_cast<const uint16_t*>(block(g)) + lane);
    }
    // What is added for each unit of the sum of a group's activations.
    Vec offset(int, int g, int lane) const {
        const Vec offset = factor(g, lane, 1);
        if (TRAITS.blocked)
            return -offset *
                   load_halves(reinterpret_cast<const uint16_t*>(block(g)) + edgellm::PANEL + lane);
        return TRAITS.bits == 8 ? offset + splat(128.0f) * factor(g, lane, 0) : offset;
    }
};

// A group of a panel with a byte for each code, ready to be multiplied.
struct alignas(64) Unpacked {
    int8_t codes[edgellm::GROUP * edgellm::PANEL];
    float scale[2][edgellm::PANEL], offset[edgellm::PANEL];
};

// Codes that are ready to be multiplied by vectors, as signed bytes.
template <int KIND>
inline Bytes signed_codes(Bytes codes) {
    if (is_signed(arithmetic(KIND))) return operand(codes);  // twice is not at all
    if (arithmetic(KIND) == UNSIGNED_AFFINE) return codes;
    return codes - int8_t(zero_of(KIND));
}

// A tile of two panels that many rows share: unpacking is done once, and a row's codes are loaded
// once for both.
template <int ARITHMETIC_>
struct Shared {
    static constexpr int ARITHMETIC = ARITHMETIC_, PANELS = WIDE_PANELS;
    // sums of halves need registers of their own
    static constexpr int ROWS = parts_of(ARITHMETIC) == 2 ? (WIDE_ROWS + 2) / 2 : WIDE_ROWS;
    Unpacked* groups;  // [PANELS, K_TILE]
    int panels;        // that are kept
    int start;

    // `TILES`: for the tiles of AMX, which take signed codes.
    template <bool TILES, int KIND>
    static void fill(Unpacked* groups, const Packed<KIND>& packed, int first, int count) {
        const auto put = [](int8_t* p, Bytes b) { *reinterpret_cast<Bytes*>(p) = b; };
        for (int g = 0; g < count; ++g) {
            int8_t* to = groups[g].codes;
            for (int lane = 0; lane < edgellm::PANEL; lane += LANES) {
                const Codes<KIND> codes = packed.codes(first + g, lane);
                for (int i = 0; i < 4; ++i) {
                    Bytes low, top;
                    codes.pair(i, low, top);
                    put(to + 64 * i + 4 * lane, TILES ? signed_codes<KIND>(low) : low);
                    put(to + 64 * (i + 4) + 4 * lane, TILES ? signed_codes<KIND>(top) : top);
                }
                for (int part = 0; part < parts_of(ARITHMETIC); ++part)
                    store(groups[g].scale[part] + lane, packed.scale(0, first + g, lane, part));
                if (is_affine(ARITHMETIC))
                    store(groups[g].offset + lane, packed.offset(0, first + g, lane));
            }
        }
    }
    void fetch_ahead(int) const {}

    template <int ROWS>
    EDGELLM_INLINED void dot_group(int g, int lane, const int8_t* x, IVec (*dots)[parts_of(ARITHMETIC)][ROWS]) const {
        dot_half<0, ROWS>(g, lane, x, dots);
        dot_half<1, ROWS>(g, lane, x, dots);
    }
    // A part that is known when it is compiled: else GCC keeps the sums in memory, half as fast.
    template <int HALF, int ROWS>
    EDGELLM_INLINED void dot_half(int g, int lane, const int8_t* x, IVec (*dots)[parts_of(ARITHMETIC)][ROWS]) const {
        constexpr int part = HALF * (parts_of(ARITHMETIC) - 1);
        Sum<ARITHMETIC> sums[PANELS][ROWS];
        unrolled<PANELS>([&](int p) EDGELLM_INLINED {
            unrolled<ROWS>([&](int r) EDGELLM_INLINED { sums[p][r] = Sum<ARITHMETIC>(dots[p][part][r]); });
        });
        unrolled<4>([&](int quarter) EDGELLM_INLINED {
            const int i = 4 * HALF + quarter;
            Bytes weights[PANELS];
            for (int p = 0; p < PANELS; ++p)
                weights[p] = load_bytes(groups[p * K_TILE + g].codes + 64 * i + 4 * lane);
            unrolled<ROWS>([&](int r) EDGELLM_INLINED {
                const Bytes quad = splat_quad(x + r * edgellm::GROUP + 4 * i);
                unrolled<PANELS>([&](int p) EDGELLM_INLINED { sums[p][r].add(weights[p], quad); });
            });
            if ((quarter + 1) % Sum<ARITHMETIC>::LIMIT == 0) settle(sums);
        });
        unrolled<PANELS>([&](int p) EDGELLM_INLINED {
            unrolled<ROWS>([&](int r) EDGELLM_INLINED { dots[p][part][r] = sums[p][r].sum(); });
        });
    }
    Vec scale(int p, int g, int lane, int part) const {
        return load(groups[p * K_TILE + g].scale[part] + lane);
    }
    Vec offset(int p, int g, int lane) const { return load(groups[p * K_TILE + g].offset + lane); }
};
