// KV caches that a primitive updates in place.
#pragma once

#include "../kernels/rows.h"
#include "arrays.h"

namespace toast {

// Throws std::invalid_argument unless heads of shape (batch, heads, positions, size) fit into a
// cache from position `first` on.
void check_cache(const mx::array &cache, const mx::Shape &heads, int first);

// Gives the updated caches of n rows, keys and values in turn, buffers: that of the cache before,
// if nobody else holds it, otherwise a new one in the same memory order. Registered writers do not
// count as holders, but are waited for: MLX keeps a buffer until the operation that writes it has
// run, so that building a step while the one before is computed would copy every cache. Registers
// the operation as their writer, and so comes last of its allocations.
void allocate_caches(const mx::array *before, mx::array *caches, size_t n = 1);

// Registers the operation that is being allocated as a user of such caches' buffers until it has
// run, see allocate_caches. One that only reads the caches registers too.
void register_writer(const mx::array *caches, size_t n = 1);

// Allocates the output of an operation that reads the caches of several rows, its inputs from the
// second on.
void allocate_reader(const Arrays &inputs, Arrays &outputs);

// Writes new heads into a cache from position `first` on, after copying the cache before unless it
// is the same buffer. A cache before that is one broadcast number is empty and not copied.
void write_heads(const mx::array &before, mx::array &cache, const toast_heads &heads,
                 int64_t first);

}  // namespace toast
