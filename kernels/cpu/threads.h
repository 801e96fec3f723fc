// Worker threads that live as long as the process.
#pragma once

#include <functional>

namespace edgellm {

// Run task(0) .. task(count - 1) on up to `threads` threads, the calling one among them. Whoever is
// free takes the next one, so that a core which is busy with something else delays one task at most.
void parallel(int count, int threads, const std::function<void(int)>& task);

}  // namespace edgellm
