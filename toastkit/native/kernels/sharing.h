// How loops are split among threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "memory.h"
#include "pool.h"

namespace toast {

constexpr int64_t CHUNK = 1 << 14;        // elements per task
constexpr int64_t SERIAL_WORK = 1 << 17;  // too few elements for a second thread

enum class Helpers { NONE, AWAKE, ALL };  // which threads of the pool take part in a loop

// Who should help with so much work. serial: less is not worth a second thread. Less than four
// times as much is not worth waking one, which takes tens of microseconds.
inline Helpers helpers(double work, double serial = SERIAL_WORK) {
  return work < serial ? Helpers::NONE : work < 4 * serial ? Helpers::AWAKE : Helpers::ALL;
}

// Calls work(first, end) on ranges that cover all rows. size: elements per row.
template <class Work>
void share(int64_t rows, int64_t size, const Work &work) {
  const Helpers help = helpers(double(rows) * size);
  if (help == Helpers::NONE) return work(0, rows);
  const int64_t each = size < CHUNK ? CHUNK / (size ? size : 1) : 1;
  run((rows + each - 1) / each, help == Helpers::ALL, [&](int64_t i) {
    work(i * each, (i + 1) * each < rows ? (i + 1) * each : rows);
  });
}

// Calls work(i) for all i < count. Each thread walks a contiguous range, so that what it prefetches
// is what it comes to next, and then steals from the ranges of others.
template <class Work>
void share_each(Helpers help, int64_t count, const Work &work) {
  if (help == Helpers::NONE) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Part parts[MAX_THREADS];
  const int64_t all = std::min<int64_t>(count, threads());
  for (int64_t i = 0; i < all; i++) {
    parts[i].next.store(count * i / all, std::memory_order_relaxed);
    parts[i].end = count * (i + 1) / all;
  }
  run(all, help == Helpers::ALL, [&](int64_t own) {
    for (int64_t k = 0; k < all; k++) {
      Part &part = parts[(own + k) % all];
      for (int64_t i; (i = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;) work(i);
    }
  });
}

// The same. False if any call is.
template <class Work>
bool share_checked(Helpers help, int64_t count, const Work &work) {
  std::atomic<bool> failed{false};
  share_each(help, count, [&](int64_t i) {
    if (!work(i)) failed.store(true, std::memory_order_relaxed);
  });
  return !failed.load(std::memory_order_relaxed);
}

}  // namespace toast
