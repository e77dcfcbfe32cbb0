// KV caches that a primitive updates in place.
#pragma once

#include "../kernels/rows.h"
#include "arrays.h"

namespace toast {

// Throws std::invalid_argument unless heads of shape (batch, heads, positions, size) fit into a
// cache from position `first` on.
void check_cache(const mx::array &cache, const mx::Shape &heads, int first);

// Gives the updated cache a buffer: that of the cache before, if nobody else holds it, otherwise a
// new one in the same memory order. Registered writers do not count as holders, but are waited for:
// MLX keeps a buffer until the operation that writes it has run, so that building a step while the
// one before is computed would copy every cache. The operation's work begins with a WriterGuard.
void allocate_cache(const mx::array &before, mx::array &cache);

// Registers an operation as a user of the cache's buffer, see allocate_cache. One that only reads
// the cache registers too; its work also begins with a WriterGuard.
void register_writer(const mx::array &cache);

// Unregisters the writer of a cache when it goes out of scope.
class WriterGuard {
 public:
  explicit WriterGuard(const mx::array &cache) : cache_(cache) {}
  ~WriterGuard();

 private:
  const mx::array &cache_;
};

// Writes new heads into a cache from position `first` on, after copying the cache before unless it
// is the same buffer. A cache before that is one broadcast number is empty and not copied.
void write_heads(const mx::array &before, mx::array &cache, const toast_heads &heads,
                 int64_t first);

}  // namespace toast
