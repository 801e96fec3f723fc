// Worker threads that live as long as the process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace edgellm {

// Run task(0) .. task(count - 1) on up to `threads` threads, the calling one among them. Whoever is
// free takes the next one, so that a core which is busy with something else delays one task at most.
void parallel(int count, int threads, const std::function<void(int)>& task);

// A buffer of the calling thread, at least `bytes` large and aligned to a cache line; the same memory
// at every call.
void* scratch(size_t bytes);

// One phase of work that several threads share; a cache line each.
struct alignas(64) Phase {
    std::atomic<int> next{0}, done{0};
};

// Lets the calling thread rest a moment while it waits for others; `turn` counts its waits.
void relax(int turn);

// What a worker may bring into its cache while it waits: the memory of the next phase's items.
struct Ahead {
    const uint8_t* data = nullptr;
    size_t item = 0, items = 0;  // bytes of one, and how many
};

// A thread's way through the phases of one job. All workers go through the same phases in the same
// order, so the job reads like a program for one thread. Nobody waits for a worker that has nothing in
// hand: one that comes late finds the phases done and catches up.
class Worker {
public:
    explicit Worker(Phase* phases) : phase_(phases) {}

    // Run item(0) .. item(count - 1), shared out among the members; returns when all are done.
    template <typename Item>
    void each(int count, const Item& item, const Ahead& ahead = {}) {
        Phase& phase = *phase_++;
        int mine = 0, i;
        for (; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) item(i);
        if (mine > 0) phase.done.fetch_add(mine, std::memory_order_release);
        // Whoever ends the phase will have the next one's first item, and those who wait one each.
        const size_t next = size_t(i - count) + 1;
        size_t at = next * ahead.item;
        const size_t end = next < ahead.items ? at + ahead.item : at;
        for (int turn = 0; phase.done.load(std::memory_order_acquire) < count;) {
            if (at < end) {
                __builtin_prefetch(ahead.data + at, 0, 2);
                at += 64;
            } else {
                relax(turn++);
            }
        }
    }

private:
    Phase* phase_;
};

// Run `job` on `threads` threads; it goes through at most `phases` phases. Afterwards the workers
// stay awake for a moment, because the next token follows soon.
void run_team(int threads, int phases, const std::function<void(Worker&)>& job);

}  // namespace edgellm
