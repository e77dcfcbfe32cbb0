// Software prefetches, which go where the processor likes them best.
#pragma once

#include "lanes.h"
#include "product.h"

namespace {

constexpr int64_t LINE = 64;  // bytes per cache line

// To L2, which allows more outstanding requests than L1 (into L1 takes 1.5 times as long on Zen 4);
// on Zen 5 to L1.
INLINE void prefetch(const void *at) {
  toast::is_zen5 ? __builtin_prefetch(at, 0, 3) : __builtin_prefetch(at, 0, 2);
}

// Prefetches memory that is needed next while something else is computed: evenly, to keep memory
// busy but not saturated. No line is requested twice, as hits in L2 take L1's request slots too.
struct PacedPrefetch {
  const char *next, *due;
  int64_t bytes;  // per fetch

  // times: number of calls of `fetch`.
  static PacedPrefetch over(const char *from, int64_t bytes, int64_t times) {
    return {from, from, (bytes + times - 1) / times};
  }

  void fetch() {  // three lines at most
    due += bytes;
    for (int i = 0; i < 3 && next < due; i++, next += LINE) prefetch(next);
  }

  void fetch(int64_t times) {  // as so many calls, without that limit
    for (due += times * bytes; next < due; next += LINE) prefetch(next);
  }
};

// Prefetches LANES rows while others are read: a line of each in turn, at the pace of the reading.
struct TilePrefetch {
  const uint8_t *line;
  int64_t stride, due = 0;  // from row to row; bytes read and not met yet
  int row = 0;

  inline __attribute__((always_inline)) void fetch(int64_t bytes) {
    for (due += bytes; due >= LINE; due -= LINE) {
      prefetch(line + row * stride);
      if (++row == LANES) row = 0, line += LINE;
    }
  }
};

}  // namespace
