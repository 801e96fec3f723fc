// What a call for many rows of logits reads and writes.
#pragma once

#include <cstdint>

namespace edgellm {

// Arguments of `edgellm_candidates`; the same fields, in the same order, as in native.py.
struct CandidatesCall {
    const float* logits;  // row r is logits[r * stride ..][0 .. count]
    int64_t* kept;        // [rows], how many of the best are wanted, and then, how many there are
    double* sums;         // [rows], the log-sum-exp of each
    int64_t* ids;         // [rows, most], ascending
    int64_t stride, count, most;
    int32_t rows, threads;
};

// Scores that have one peak, and those that one thread goes through at a time.
constexpr int64_t RUN = 64, PART = 64 * RUN;

}  // namespace edgellm
