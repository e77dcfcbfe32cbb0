// Where software prefetches go: the fastest place differs by processor.
#pragma once

#include "lanes.h"

namespace toast {

// Into L1, on AMD's family 1Ah (Zen 5), where reads from L2 stall; else into L2, which allows more
// outstanding requests (into L1 takes 1.5 times as long on Zen 4).
extern const bool prefetches_into_l1;

}  // namespace toast

namespace {

INLINE void prefetch(const void *at) {
  toast::prefetches_into_l1 ? __builtin_prefetch(at, 0, 3) : __builtin_prefetch(at, 0, 2);
}

}  // namespace
