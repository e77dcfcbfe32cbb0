// The thread pool.
#pragma once

#include <stdint.h>

namespace toast {

constexpr int MAX_THREADS = 256;

// Calls work(context, i) for all i < count on the pool's threads and the caller's, in any order,
// and returns when all are done. If the pool is busy with another caller, this thread does all of
// it. wake: threads that sleep help too, not only those that still spin.
void run(int64_t count, void (*work)(void *context, int64_t index), void *context, bool wake);

template <class Work>
void run(int64_t count, bool wake, const Work &work) {
  run(count, [](void *context, int64_t i) { (*static_cast<const Work *>(context))(i); },
      const_cast<Work *>(&work), wake);
}

void set_threads(int count);
int threads();

}  // namespace toast
