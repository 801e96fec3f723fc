// Instruction-set choice and worker threads of the native kernels.
#include "threads.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "isa.h"
#include "platform.h"
#ifdef EDGELLM_X86
#include <cpuid.h>
#endif

namespace edgellm {
namespace {

#ifdef EDGELLM_X86
// The processor itself is asked: to zig's __builtin_cpu_supports it has nothing.
struct Cpuid {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    explicit Cpuid(unsigned leaf, unsigned part = 0) { __get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx); }
};

bool all_of(unsigned word, unsigned bits) { return (word & bits) == bits; }

// The sets of registers that the operating system saves for a thread.
unsigned saved_registers() {
    if (!(Cpuid(1).ecx & bit_OSXSAVE)) return 0;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#endif

#ifdef EDGELLM_HAS_AMX
// Whether a product of two tiles is what it has to be.
__attribute__((target("amx-tile,amx-int8"))) bool tiles_multiply() {
    constexpr int ROWS = 16, QUADS = 8;
    struct alignas(64) Shapes {
        uint8_t head[16] = {1};
        uint16_t row_bytes[16] = {64, 4 * QUADS, 64};
        uint8_t rows[16] = {ROWS, ROWS, QUADS};
    } shapes;
    alignas(64) int8_t x[ROWS][4 * QUADS], w[QUADS][16][4];
    alignas(64) int32_t sums[ROWS][16] = {};
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4 * QUADS; ++i) x[r][i] = static_cast<int8_t>(37 * r + 11 * i);
    for (int i = 0; i < QUADS; ++i)
        for (int j = 0; j < 64; ++j) w[i][j / 4][j % 4] = static_cast<int8_t>(29 * (64 * i + j) + 5);
    asm volatile("" : : "r"(&shapes), "r"(x), "r"(w) : "memory");
    _tile_loadconfig(&shapes);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, x, 4 * QUADS);
    _tile_loadd(2, w, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
    for (int r = 0; r < ROWS; ++r)
        for (int lane = 0; lane < 16; ++lane) {
            for (int i = 0; i < 4 * QUADS; ++i) sums[r][lane] -= x[r][i] * w[i / 4][lane][i % 4];
            if (sums[r][lane] != 0) return false;
        }
    return true;
}
#endif

bool has(Isa isa) {
#ifdef EDGELLM_X86
    constexpr unsigned YMM = 0x06, ZMM = 0xe6;
    const Cpuid extended(7);
    const bool avx2 = all_of(saved_registers(), YMM) && all_of(Cpuid(1).ecx, bit_FMA | bit_F16C) &&
                      all_of(extended.ebx, bit_AVX2);
    if (isa == Isa::AVX2) return avx2;
#ifdef EDGELLM_HAS_AVXVNNI
    if (isa == Isa::AVXVNNI) return avx2 && (Cpuid(7, 1).eax >> 4 & 1);
#endif
    if (isa == Isa::AVX512)
        return avx2 && all_of(saved_registers(), ZMM) && all_of(extended.ecx, bit_AVX512VNNI) &&
               all_of(extended.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
#ifdef EDGELLM_HAS_AMX
    constexpr unsigned TILES = 0x60000, AMX_TILE_AND_INT8 = 3u << 24;
    if (isa == Isa::AMX) {
        static const bool tiles = has(Isa::AVX512) && all_of(saved_registers(), TILES) &&
                                  all_of(extended.edx, AMX_TILE_AND_INT8) && platform::allow_tiles(tiles_multiply);
        return tiles;
    }
#endif
#endif
#ifdef EDGELLM_ARM
    if (isa == Isa::NEON) return platform::has_dot_products();
#endif
    return isa == Isa::SCALAR;
}

constexpr Isa ALL[] = {Isa::AMX, Isa::AVX512, Isa::AVXVNNI, Isa::AVX2, Isa::NEON, Isa::SCALAR};
constexpr const char* NAMES[] = {"amx", "avx512", "avxvnni", "avx2", "neon", "scalar"};

std::atomic<int> chosen{-1};

// For how long a worker stays awake after a decode step: sampling and what the caller does with a
// token take a few tenths of a millisecond, and waking up costs about 50 us.
constexpr auto LINGER = std::chrono::microseconds(500);

// One batch of tasks at a time; workers sleep between batches.
class Pool {
public:
    // `linger`: the workers stay awake afterwards, for a while.
    void run(int count, int threads, bool linger, const std::function<void(int)>& task) {
        std::lock_guard<std::mutex> one_at_a_time(batch_);
        {
            std::lock_guard<std::mutex> lock(state_);
            while (static_cast<int>(workers_.size()) < threads - 1) {
                std::thread worker(&Pool::work, this, static_cast<int>(workers_.size()));
                workers_.push_back(worker.native_handle());
                worker.detach();
                kept_off_ = -1;
            }
            keep_off_this_core();
            task_ = &task;
            count_ = count;
            next_ = 0;
            helpers_ = threads - 1;
            busy_ = 0;
            linger_ = linger;
            ++generation_;
        }
        wake_.notify_all();
        take(task, count);
        std::unique_lock<std::mutex> lock(state_);
        helpers_ = 0;  // who has not woken up by now is not needed any more
        done_.wait(lock, [&] { return busy_ == 0; });
        task_ = nullptr;
    }

private:
    // ONNX Runtime's pool spins on the other cores between two segments, and a worker that wakes up
    // may be put on the caller's core to wait for it. Without this, two threads were no faster than one
    // (1,762 against 1,773 tokens/s at pp512 on two cores); with it, 2,100.
    void keep_off_this_core() {
        const int core = platform::current_core();
        if (core == kept_off_ || core < 0) return;
        if (platform::keep_off(core, workers_)) kept_off_ = core;
    }

    void take(const std::function<void(int)>& task, int count) {
        for (int i = next_++; i < count; i = next_++) task(i);
    }

    void work(int index) {
        long seen = 0;
        std::unique_lock<std::mutex> lock(state_);
        for (;;) {
            if (linger_) {
                lock.unlock();
                const auto until = std::chrono::steady_clock::now() + LINGER;
                for (int turn = 0; generation_ == seen; ++turn) {
                    relax(turn);
                    if (turn % 64 == 63 && std::chrono::steady_clock::now() > until) break;
                }
                lock.lock();
            }
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (index >= helpers_ || task_ == nullptr) continue;
            ++busy_;
            const auto* task = task_;
            const int count = count_;
            lock.unlock();
            take(*task, count);
            lock.lock();
            if (--busy_ == 0) done_.notify_all();
        }
    }

    std::mutex batch_, state_;
    std::condition_variable wake_, done_;
    std::atomic<int> next_{0};
    std::atomic<long> generation_{0};
    const std::function<void(int)>* task_ = nullptr;
    std::vector<std::thread::native_handle_type> workers_;
    int count_ = 0, helpers_ = 0, busy_ = 0, kept_off_ = -1;
    bool linger_ = false;
};

// A child of fork() has none of its parent's threads, so it gets a pool of its own. Pools are never
// destroyed: a detached worker may outlive every static object.
Pool& pool() {
    static std::mutex guard;
    static Pool* current = nullptr;
    static long owner = 0;
    std::lock_guard<std::mutex> lock(guard);
    if (owner != platform::process()) {
        current = new Pool;
        owner = platform::process();
    }
    return *current;
}

// As many cores as a test says there are; 0 asks the system.
std::atomic<int> assumed_cores{0};

// Threads past the number of cores would only wait for each other.
int cores() {
    if (const int assumed = assumed_cores.load(std::memory_order_relaxed); assumed > 0) return assumed;
    return platform::cores();
}

}  // namespace

Isa current_isa() {
    int index = chosen.load(std::memory_order_relaxed);
    if (index < 0) {
        index = 0;
        while (!has(ALL[index])) ++index;
        chosen = index;
    }
    return ALL[index];
}

void parallel(int count, int threads, const std::function<void(int)>& task) {
    threads = std::min({threads, count, cores()});
    if (threads <= 1) {
        for (int i = 0; i < count; ++i) task(i);
        return;
    }
    pool().run(count, threads, false, task);
}

void* scratch(size_t bytes) {
    constexpr std::align_val_t LINE{64};
    struct Buffer {
        void* data = nullptr;
        size_t size = 0;
        ~Buffer() { ::operator delete(data, LINE); }
    };
    static thread_local Buffer buffer;
    if (buffer.size < bytes) {
        ::operator delete(buffer.data, LINE);
        buffer.size = (bytes + 4095) / 4096 * 4096;
        buffer.data = ::operator new(buffer.size, LINE, std::nothrow);
        if (buffer.data == nullptr) std::abort();
    }
    return buffer.data;
}

void relax(int turn) {
    if (turn % 4096 == 4095) {
        std::this_thread::yield();
        return;
    }
#if defined(EDGELLM_X86)
    _mm_pause();
#elif defined(EDGELLM_ARM)
    asm volatile("yield");
#endif
}

void run_team(int threads, int phases, const std::function<void(Worker&)>& job) {
    const std::unique_ptr<Phase[]> shared(new Phase[phases]);
    threads = std::min(threads, cores());
    if (threads <= 1) {
        Worker alone(shared.get());
        return job(alone);
    }
    pool().run(threads, threads, true, [&](int) {
        Worker worker(shared.get());
        job(worker);
    });
}

}  // namespace edgellm

extern "C" {

// Name of the instruction set in use.
const char* edgellm_isa() {
    return edgellm::NAMES[static_cast<int>(edgellm::current_isa())];
}

// For tests of more threads than this machine has cores; 0 takes those that it has.
void edgellm_assume_cores(int count) {
    edgellm::assumed_cores = count;
}

// Use an instruction set by name; 0 if this processor does not have it.
int edgellm_set_isa(const char* name) {
    for (size_t i = 0; i < std::size(edgellm::ALL); ++i) {
        if (std::strcmp(name, edgellm::NAMES[i]) == 0 && edgellm::has(edgellm::ALL[i])) {
            edgellm::chosen = static_cast<int>(i);
            return 1;
        }
    }
    return 0;
}
}
