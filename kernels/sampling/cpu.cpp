// Sampling's passes over the vocabulary. The best k scores lie in the k runs whose peaks are highest, so
// that one pass over all scores is enough.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "../cpu/threads.h"
#include "call.h"

#define EDGELLM_KERNEL "../sampling/cpu.h"
#include "../cpu/every_isa.h"

namespace {

struct Scored {
    float score;
    int64_t id;
};

bool better(const Scored& a, const Scored& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

void find_peaks_of(const float* scores, int64_t count, float* peaks) {
    EDGELLM_CALL(find_peaks(scores, count, peaks))
}

double log_sum_exp_of(const float* scores, int64_t count, float top) {
    EDGELLM_CALL(log_sum_exp(scores, count, top))
}

std::vector<float> peaks_of(const float* scores, int64_t count) {
    std::vector<float> peaks(size_t(edgellm::runs_of(count)));
    find_peaks_of(scores, count, peaks.data());
    return peaks;
}

double log_sum_exp_of(const float* scores, int64_t count, const std::vector<float>& peaks) {
    return log_sum_exp_of(scores, count, *std::max_element(peaks.begin(), peaks.end()));
}

// The best k, in any order; of equal ones those that come first.
std::vector<Scored> best_of(const float* scores, int64_t count, size_t k, const std::vector<float>& peaks) {
    float threshold = -INFINITY;
    if (peaks.size() > k) {
        std::vector<float> highest = peaks;
        const auto last = highest.begin() + static_cast<std::ptrdiff_t>(k - 1);
        std::nth_element(highest.begin(), last, highest.end(), std::greater<float>());
        threshold = *last;
    }
    std::vector<Scored> best;
    best.reserve(4 * k);
    for (size_t run = 0; run < peaks.size(); ++run) {
        if (peaks[run] < threshold) continue;
        const int64_t from = int64_t(run) * edgellm::RUN;
        for (int64_t i = from; i < std::min(count, from + edgellm::RUN); ++i)
            if (scores[i] >= threshold) best.push_back({scores[i], i});
    }
    if (best.size() > k) {
        std::nth_element(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(k), best.end(), better);
        best.resize(k);
    }
    return best;
}

// A row with a score that is not finite has no candidates: whoever looks at all of it will see it.
void candidates(const edgellm::CandidatesCall& call, int r) {
    const float* row = call.logits + r * call.stride;
    const std::vector<float> peaks = peaks_of(row, call.count);
    call.sums[r] = log_sum_exp_of(row, call.count, peaks);
    call.kept[r] = 0;
    if (call.wanted[r] == 0 || !std::isfinite(call.sums[r])) return;
    int64_t* ids = call.ids + r * call.most;
    for (const Scored& each : best_of(row, call.count, size_t(call.wanted[r]), peaks))
        ids[call.kept[r]++] = each.id;
    std::sort(ids, ids + call.kept[r]);
}

}  // namespace

extern "C" {

double edgellm_log_sum_exp(const float* scores, int64_t count) {
    return log_sum_exp_of(scores, count, peaks_of(scores, count));
}

int64_t edgellm_top_k(const float* scores, int64_t count, int64_t k, int64_t* ids) {
    if (k < 1) return 0;
    std::vector<Scored> best = best_of(scores, count, size_t(k), peaks_of(scores, count));
    std::sort(best.begin(), best.end(), better);
    for (size_t i = 0; i < best.size(); ++i) ids[i] = best[i].id;
    return static_cast<int64_t>(best.size());
}

void edgellm_candidates(const edgellm::CandidatesCall* call) {
    // the step's team is still awake
    edgellm::run_team(std::min(call->threads, call->rows), 1, [&](edgellm::Worker& worker) {
        worker.each(call->rows, [&](int r) { candidates(*call, r); });
    });
}
}
