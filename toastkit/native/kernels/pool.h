// The thread pool.
#pragma once

#include <stdint.h>

namespace toast {

constexpr int MAX_THREADS = 256;

// Calls work(context, i) for all i < count on the pool's threads and the caller's, in any order,
// and returns when all are done. If the pool is busy with another caller, this thread does all of
// it.
void run(int64_t count, void (*work)(void *context, int64_t index), void *context);

template <class Work>
void run(int64_t count, const Work &work) {
  run(count, [](void *context, int64_t i) { (*static_cast<const Work *>(context))(i); },
      const_cast<Work *>(&work));
}

void set_threads(int count);
int threads();

}  // namespace toast
