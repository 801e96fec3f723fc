// Sampling's passes over the vocabulary.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../cpu/threads.h"
#include "call.h"

namespace edgellm {

Best::Best(int64_t k) : threshold(-INFINITY), k_(static_cast<size_t>(k)) { candidates_.reserve(4 * k_); }

void Best::offer(float score, int64_t id) {
    if (full_ ? !(score > threshold) : score != score) return;
    candidates_.push_back({score, id});
    if (candidates_.size() == 4 * k_ || (!full_ && candidates_.size() == k_)) shrink();
}

void Best::shrink() {
    const auto better = [](const Scored& a, const Scored& b) {
        return a.score > b.score || (a.score == b.score && a.id < b.id);
    };
    const size_t left = std::min(k_, candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(left),
                      candidates_.end(), better);
    candidates_.resize(left);
    full_ = left == k_;
    if (full_) threshold = candidates_.back().score;
}

int64_t Best::finish() {
    shrink();
    return static_cast<int64_t>(candidates_.size());
}

}  // namespace edgellm

#define EDGELLM_KERNEL "../sampling/cpu.h"
#include "../cpu/every_isa.h"

extern "C" double edgellm_log_sum_exp(const float* scores, int64_t count) {
    EDGELLM_CALL(log_sum_exp(scores, count))
}

static int64_t best_of(const float* scores, int64_t count, edgellm::Best& best) {
    EDGELLM_CALL(best_of(scores, count, best))
}

extern "C" int64_t edgellm_top_k(const float* scores, int64_t count, int64_t k, int64_t* ids) {
    edgellm::Best best(k);
    const int64_t kept = best_of(scores, count, best);
    for (int64_t i = 0; i < kept; ++i) ids[i] = best.candidates()[static_cast<size_t>(i)].id;
    return kept;
}
