// What a call for many rows of logits reads and writes.
#pragma once

#include <cstdint>

namespace edgellm {

// Arguments of `edgellm_candidates`; the same fields, in the same order, as in native.py.
struct CandidatesCall {
    const float* logits;    // row r is logits[r * stride ..][0 .. count]
    const int64_t* wanted;  // [rows], how many of the best are; 0: none
    double* sums;           // [rows], the log-sum-exp of each
    int64_t* ids;           // [rows, most], ascending
    int64_t* kept;          // [rows], how many there are; 0 where the sum is not finite
    int64_t stride, count, most;
    int32_t rows, threads;
};

// Scores that have one peak.
constexpr int64_t RUN = 64;

inline int64_t runs_of(int64_t count) { return (count + RUN - 1) / RUN; }

}  // namespace edgellm
