// What a call that seals blocks is made of.
#pragma once

#include "../cpu/kv_blocks.h"

namespace edgellm {

// Arguments of one call; the same fields, in the same order, as in native.py.
struct SealCall {
    KV kv;
    int32_t layer, first, end, threads;  // numbers of blocks of the sequence, from the one to before the other
};

}  // namespace edgellm
