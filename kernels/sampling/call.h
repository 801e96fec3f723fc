// The best k of many scores.
#pragma once

#include <cstdint>
#include <vector>

namespace edgellm {

struct Scored {
    float score;
    int64_t id;
};

// Keeps up to 4 k candidates and throws all but the best k away when they are full. Equal scores: those that
// came first are better. Not compiled for each instruction set: it sees few of the scores.
class Best {
public:
    explicit Best(int64_t k);
    float threshold;  // only scores above it are worth offering, once there are k

    bool full() const { return full_; }
    void offer(float score, int64_t id);
    int64_t finish();
    const std::vector<Scored>& candidates() const { return candidates_; }

private:
    void shrink();

    std::vector<Scored> candidates_;
    size_t k_;
    bool full_ = false;
};

}  // namespace edgellm
