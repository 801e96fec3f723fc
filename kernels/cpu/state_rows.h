// The states before and after the rows that a mixer works on.
#pragma once

#include <cstdint>

namespace edgellm {

// Where the state after so many rows of a span goes; the same fields as in native.py.
struct StateTarget {
    float* block;
    int32_t rows;
};

// Rows of one sequence that follow each other, and the states of a layer; the same fields as in native.py.
struct StateRows {
    const float* source;         // before the first row; null: all zeros
    const StateTarget* targets;  // in the order of their rows, the last one for all; the first may be the source
    int32_t rows;
};

}  // namespace edgellm
