// Weights of a layer that computes one of several residual streams.
#pragma once

namespace edgellm {

constexpr int MOST_STREAMS = 8;

// The same fields, in the same order, as in native.py; see __init__.py. Without a router there is one stream.
struct AltUp {
    const float *router_norm, *router;  // [hidden], [streams, hidden]
    const float *predict, *correct;     // [streams * streams, streams], [streams, streams]
    const float* scale;                 // [hidden]
};

}  // namespace edgellm
