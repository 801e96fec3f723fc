// Products of registers with registers and nothing else: the rate that no kernel exceeds; included once for each
// instruction set.

#if defined(EDGELLM_VNNI512) || defined(EDGELLM_AVX2)
#define EDGELLM_IN_REGISTER "+v"
#elif defined(EDGELLM_NEON)
#define EDGELLM_IN_REGISTER "+w"
#else
#define EDGELLM_IN_REGISTER "+m"
#endif

// Have the compiler take a value for one that was changed, and is read.
inline void keep(Bytes& value) { asm volatile("" : EDGELLM_IN_REGISTER(value)); }
inline void keep(IVec& value) { asm volatile("" : EDGELLM_IN_REGISTER(value)); }

// Of codes of 4 bits: with AVX2 alone they take the fewest instructions.
inline double bare_vectors(int turns) {
    constexpr int SUMS = 12;  // as many as hide the latency of a product
    CodeSum<15> sums[1][SUMS];
    Bytes a = Bytes{} + int8_t(1), b = a;
    for (int turn = 0; turn < turns; ++turn) {
        unrolled<SUMS>([&](auto i) EDGELLM_INLINED {
            keep(a), keep(b);  // or they are multiplied once for all
            sums[0][i].add(a, b);
        });
        if (turn % CodeSum<15>::LIMIT == CodeSum<15>::LIMIT - 1) settle(sums);
    }
    settle(sums);
    unrolled<SUMS>([&](auto i) EDGELLM_INLINED {
        IVec sum = sums[0][i].sum();
        keep(sum);
    });
    return 2.0 * 4 * LANES * SUMS * turns;
}

#ifdef EDGELLM_TILES
inline double bare_tiles(int turns) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = 16, shapes.row_bytes[tile] = 64;
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    for (int turn = 0; turn < turns; ++turn) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return 2.0 * 16 * 16 * 64 * 4 * turns;
}
#endif

// Do `turns` turns of products of 8-bit integers on each thread; gives the number of operations.
inline double bare_products(int threads, int turns) {
    std::atomic<double> operations{0};
    edgellm::parallel(threads, threads, [&](int) {
#ifdef EDGELLM_TILES
        if (edgellm::current_isa() == edgellm::Isa::AMX) {
            operations = threads * bare_tiles(turns);
            return;
        }
#endif
        operations = threads * bare_vectors(turns);
    });
    return operations;
}

#undef EDGELLM_IN_REGISTER
