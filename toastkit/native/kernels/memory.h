// Owned, aligned memory.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#include <memory>

namespace toast {

struct Free {
  void operator()(void *p) const { free(p); }
};
template <class T>
using Memory = std::unique_ptr<T[], Free>;

// Uninitialised room for `count` elements, aligned to 64 bytes; NULL if out of memory.
template <class T>
Memory<T> memory(int64_t count) {
  return Memory<T>(static_cast<T *>(aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64)));
}

}  // namespace toast
