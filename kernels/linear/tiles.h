// Products of 16 rows on the tiles of AMX (Intel's Architecture Instruction Set Extensions, chapter 3); included
// with the kernels of AVX-512 alone.
//
// A tile takes in the 32 inputs of a group at once, for 16 rows and the 16 outputs of a panel. Its integer sums are
// those of the other kernels, and so are the float operations behind them, in the same order. Sums leave the tiles
// behind each group, which takes as long as the rest: 512 rows have 1.1 (affine) to 1.35 times the speed of AVX-512 VNNI, and 64 rows
// 1.0 to 1.2 times, where bare products have 8 times. Once a
// thread has used a tile, a core of Sapphire Rapids does one operation on 16 floats a cycle for a while, not two, so
// kinds with two scales a group, and inputs of 16 bits, stay with VNNI: 0.7 to 0.8 of its speed.

#define INLINE __attribute__((always_inline))

constexpr int TILE_ROWS = 16;
// Fewer rows go by VNNI: a block that is not full costs as much as one that is.
constexpr int TILES_FROM = 48;

// Groups of two panels that stay in the first cache beside 16 rows: with 24, 76 cycles for a block of rows and a group of
// a panel, with 16, 68, and by VNNI 96 (Intel Xeon, Sapphire Rapids).
constexpr int TILE_GROUPS = 16;

constexpr bool goes_by_tiles(int kind, bool fine) { return parts_of(arithmetic(kind)) == 1 && !fine; }

// Shapes of the tiles in use: 0 and 1 have sums, 2 and 3 activations, 4 and 5 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, edgellm::GROUP, edgellm::GROUP, 64, 64};
    uint8_t rows[16] = {};
};

// Set the tiles of this thread up for so many rows.
inline void set_tiles(int rows) {
    const auto count = static_cast<uint8_t>(rows);
    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.rows[tile] = tile < 4 ? count : edgellm::GROUP / 4;
    // GCC's functions do not say what memory they read
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

// ZERO in all numbers of a tile, where sums start from.
struct alignas(64) TileStarts {
    int32_t sums[TILE_ROWS][edgellm::PANEL];
    TileStarts() {
        for (auto& row : sums)
            for (int32_t& sum : row) sum = ZERO;
    }
};

// `scaled` in the form that overwrites the sum: from the other one GCC makes a copy of the scale for each row.
inline INLINE Vec scaled_sum(Vec sum, Vec scale, Vec zero) {
    asm("vfmadd213ps %2, %1, %0" : "+v"(sum) : "v"(scale), "v"(zero));
    return sum;
}

// Product of a block of 16 rows and one panel of a tile of weights, see Unpacked.
template <bool AFFINE>
class TileProduct {
    using Sums = int32_t[TILE_ROWS][edgellm::PANEL];

public:
    // of `x` rows from `row` on, groups from `from` on
    TileProduct(const Unpacked* weights, int groups, const edgellm::Rows& x, int row, int from)
        : weights_(weights), groups_(groups), beside_(x.beside(row)) {
        const size_t at = x.at(row, from);
        codes_ = x.codes + at * edgellm::GROUP;
        rows_ = x.groups + at;
    }

    // y[0 .. 16, 0 .. 16) (+)= x . panel
    void run(float* y, size_t step, bool add) const {
        static const TileStarts starts;
        alignas(64) Sums sums[4];  // of the groups on their way: a tile is stored long after its product is begun
        Vec total[TILE_ROWS] = {};
        if (add) unrolled<TILE_ROWS>([&](auto r) INLINE { total[r] = load(y + r * step); });
        const auto even = [&](int g) INLINE {
            _tile_loadd(0, starts.sums, 64);
            _tile_loadd(2, codes(g), edgellm::GROUP);
            _tile_loadd(4, weights_[g].codes, 64);
            _tile_dpbssd(0, 2, 4);
            _tile_stored(0, sums[g % 4], 64);
        };
        const auto odd = [&](int g) INLINE {
            _tile_loadd(1, starts.sums, 64);
            _tile_loadd(3, codes(g), edgellm::GROUP);
            _tile_loadd(5, weights_[g].codes, 64);
            _tile_dpbssd(1, 3, 5);
            _tile_stored(1, sums[g % 4], 64);
        };
        // the tiles are two groups ahead of the vectors
        even(0);
        if (groups_ > 1) odd(1);
        for (int g = 0; g < groups_; g += 2) {
            if (g + 2 < groups_) even(g + 2);
            add_scaled(g, sums[g % 4], total);
            if (g + 1 == groups_) break;
            if (g + 3 < groups_) odd(g + 3);
            add_scaled(g + 1, sums[(g + 1) % 4], total);
        }
        unrolled<TILE_ROWS>([&](auto r) INLINE { store(y + r * step, total[r]); });
    }

private:
    const int8_t* codes(int g) const { return codes_ + g * beside_ * edgellm::GROUP; }

    INLINE void add_scaled(int g, const Sums& sums, Vec* total) const {
        const edgellm::RowGroup* rows = rows_ + g * beside_;
        const Vec scale = load(weights_[g].scale[0]), zero = zero_scaled(scale);
        unrolled<TILE_ROWS>([&](auto r) INLINE {
            const Vec sum = load(reinterpret_cast<const float*>(sums[r]));
            total[r] += scaled_sum(sum, scale, zero) * splat(rows[r].scale);
        });
        if (!AFFINE) return;
        const Vec offset = load(weights_[g].offset);
        unrolled<TILE_ROWS>([&](auto r) INLINE { total[r] += offset * splat(rows[r].shift); });
    }

    const Unpacked* weights_;
    int groups_;
    size_t beside_;
    const int8_t* codes_;
    const edgellm::RowGroup* rows_;
};

// The same as all_rows for a tile of `panels` panels whose codes are signed.
template <bool AFFINE>
inline void all_rows_by_tiles(const Unpacked* weights, int panels, int groups, const edgellm::Rows& x, int rows,
                              int from, float* y, size_t step, bool add) {
    const auto block = [&](int row, int p, float* out, size_t out_step) {
        TileProduct<AFFINE>(weights + p * K_TILE, groups, x, row, from).run(out, out_step, add);
    };
    const int rest = rows % TILE_ROWS, whole = rows - rest;
    set_tiles(TILE_ROWS);
    for (int row = 0; row < whole; row += TILE_ROWS)
        for (int p = 0; p < panels; ++p) block(row, p, y + row * step + p * edgellm::PANEL, step);
    if (rest > 0) set_tiles(rest);
    for (int p = 0; rest > 0 && p < panels; ++p) {
        float last[TILE_ROWS][edgellm::PANEL];
        float* out = y + whole * step + p * edgellm::PANEL;
        for (int r = 0; add && r < rest; ++r) store(last[r], load(out + r * step));
        block(whole, p, last[0], edgellm::PANEL);
        for (int r = 0; r < rest; ++r) store(out + r * step, load(last[r]));
    }
    _tile_release();
}

#undef INLINE
