// Caches of keys and values, wherever they are a part of a primitive.
#pragma once

#include "../kernels/rows.h"
#include "arrays.h"

namespace toast {

// Raises std::invalid_argument unless heads (batch, heads, positions, size) can be written to a
// cache from position `first` on.
void check_cache(const mx::array &cache, const mx::Shape &heads, int first);

// Gives a cache memory: that of the one before, if nobody else has that; else its own, in the same
// order. What is in line to write there counts as nobody, and is waited for: MLX holds its memory
// until it has run, and who builds one step while another is computed would copy all caches.
// Whoever computes it begins with a Written of it.
void lie_as_before(const mx::array &before, mx::array &cache);

// Has who reads a cache stand in line with those who write there. Whoever reads it then begins with
// a Written of it, too.
void line_up(const mx::array &cache);

// While it is there, a cache is being written to; then it is not in line any more.
class Written {
 public:
  explicit Written(const mx::array &cache) : cache_(cache) {}
  ~Written();

 private:
  const mx::array &cache_;
};

// Writes new heads from `first` on into a cache that lies so, and what was there before unless it
// is there; one number for all places stands for nothing.
void write_heads(const mx::array &before, mx::array &cache, const toast_heads &heads,
                 int64_t first);

}  // namespace toast
