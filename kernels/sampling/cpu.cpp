// Sampling's passes over the vocabulary. The best k scores lie in the k runs whose peaks are highest, so
// that one pass over all scores is enough.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
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

double sum_exp_of(const float* scores, int64_t count, float top) { EDGELLM_CALL(sum_exp(scores, count, top)) }

// A row of scores, in parts that threads may share out: first all peaks, and then all sums.
class Row {
public:
    Row(const float* scores, int64_t count)
        : scores_(scores),
          count_(count),
          peaks_(size_t((count + edgellm::RUN - 1) / edgellm::RUN)),
          tops_(size_t(parts())),
          sums_(size_t(parts())) {}

    int parts() const { return int((count_ + edgellm::PART - 1) / edgellm::PART); }

    void find_peaks(int part) {
        const int64_t first = part * (edgellm::PART / edgellm::RUN);
        const int64_t runs = (size_of(part) + edgellm::RUN - 1) / edgellm::RUN;
        float* peaks = peaks_.data() + first;
        find_peaks_of(scores_ + part * edgellm::PART, size_of(part), peaks);
        tops_[size_t(part)] = *std::max_element(peaks, peaks + runs);
    }

    void add_up(int part) {
        sums_[size_t(part)] = sum_exp_of(scores_ + part * edgellm::PART, size_of(part), top());
    }

    double log_sum_exp() const { return top() + std::log(std::accumulate(sums_.begin(), sums_.end(), 0.0)); }

    // The best k, in any order; of equal ones those that come first.
    std::vector<Scored> best(size_t k) const {
        const float least = threshold(k);
        std::vector<Scored> best;
        best.reserve(4 * k);
        for (size_t run = 0; run < peaks_.size(); ++run) {
            if (peaks_[run] < least) continue;
            const int64_t from = int64_t(run) * edgellm::RUN;
            for (int64_t i = from; i < std::min(count_, from + edgellm::RUN); ++i)
                if (scores_[i] >= least) best.push_back({scores_[i], i});
        }
        if (best.size() > k) {
            std::nth_element(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(k), best.end(), better);
            best.resize(k);
        }
        return best;
    }

private:
    int64_t size_of(int part) const { return std::min(edgellm::PART, count_ - part * edgellm::PART); }

    float top() const { return *std::max_element(tops_.begin(), tops_.end()); }

    // At least k scores are as high.
    float threshold(size_t k) const {
        if (peaks_.size() <= k) return -INFINITY;
        std::vector<float> peaks = peaks_;
        const auto last = peaks.begin() + static_cast<std::ptrdiff_t>(k - 1);
        std::nth_element(peaks.begin(), last, peaks.end(), std::greater<float>());
        return *last;
    }

    const float* scores_;
    int64_t count_;
    std::vector<float> peaks_, tops_;  // of each run, of each part
    std::vector<double> sums_;         // of each part
};

Row with_peaks(const float* scores, int64_t count) {
    Row row(scores, count);
    for (int part = 0; part < row.parts(); ++part) row.find_peaks(part);
    return row;
}

// A row with a score that is not finite has no candidates: whoever looks at all of it will see it.
void write_candidates(const Row& row, const edgellm::CandidatesCall& call, int r) {
    const int64_t wanted = std::min(call.kept[r], call.most);
    call.sums[r] = row.log_sum_exp();
    call.kept[r] = 0;
    if (wanted == 0 || !std::isfinite(call.sums[r])) return;
    int64_t* ids = call.ids + r * call.most;
    for (const Scored& each : row.best(size_t(wanted))) ids[call.kept[r]++] = each.id;
    std::sort(ids, ids + call.kept[r]);
}

}  // namespace

extern "C" {

double edgellm_log_sum_exp(const float* scores, int64_t count) {
    Row row = with_peaks(scores, count);
    for (int part = 0; part < row.parts(); ++part) row.add_up(part);
    return row.log_sum_exp();
}

int64_t edgellm_top_k(const float* scores, int64_t count, int64_t k, int64_t* ids) {
    if (k < 1) return 0;
    std::vector<Scored> best = with_peaks(scores, count).best(size_t(k));
    std::sort(best.begin(), best.end(), better);
    for (size_t i = 0; i < best.size(); ++i) ids[i] = best[i].id;
    return static_cast<int64_t>(best.size());
}

void edgellm_candidates(const edgellm::CandidatesCall* call) {
    std::vector<Row> rows;
    for (int r = 0; r < call->rows; ++r) rows.emplace_back(call->logits + r * call->stride, call->count);
    const int parts = rows[0].parts(), items = parts * call->rows;
    // the step's team is still awake
    edgellm::run_team(std::min(call->threads, items), 3, [&](edgellm::Worker& worker) {
        worker.each(items, [&](int i) { rows[size_t(i / parts)].find_peaks(i % parts); });
        worker.each(items, [&](int i) { rows[size_t(i / parts)].add_up(i % parts); });
        worker.each(call->rows, [&](int r) { write_candidates(rows[size_t(r)], *call, r); });
    });
}
}
