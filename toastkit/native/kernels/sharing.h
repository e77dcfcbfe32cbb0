// How rows are shared out among the threads.
#pragma once

#include "memory.h"
#include "pool.h"

namespace toast {

constexpr int64_t CHUNK = 1 << 14;   // numbers that a thread takes at a time
constexpr int64_t LITTLE = 1 << 15;  // that are not worth a second thread

// work(first, end) over all rows, some at a time. size: numbers of a row.
template <class Work>
void share(int64_t rows, int64_t size, const Work &work) {
  if (rows * size < LITTLE) return work(0, rows);
  const int64_t each = size < CHUNK ? CHUNK / (size ? size : 1) : 1;
  run((rows + each - 1) / each, [&](int64_t i) {
    work(i * each, (i + 1) * each < rows ? (i + 1) * each : rows);
  });
}

}  // namespace toast
