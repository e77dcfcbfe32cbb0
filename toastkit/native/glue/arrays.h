// Shared by all primitives: access to mlx.core arrays, their dtypes and memory; lazy operations.
#pragma once

#include <stdint.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"

namespace mx = mlx::core;

namespace toast {

// The mx::array inside a Python mlx.core.array object.
mx::array &array_of(void *object);
// As array_of; NULL for a NULL object.
inline const mx::array *array_if(void *object) { return object ? &array_of(object) : nullptr; }

// The kernels' TOAST_ dtype of a float array. Throws std::invalid_argument for any other dtype.
int type_of(const mx::array &a);

// As type_of, and TOAST_I8 for an 8-bit KV cache (int8 rows, each followed by its scale).
int cache_type(const mx::array &a);

// Size of a head of keys or values, without the float32 scale that ends a row of an 8-bit cache.
int head_size(const mx::array &a);

// Throws std::invalid_argument(what) unless `holds`.
void check(bool holds, const char *what);

// Row-contiguous data of an array: the array's own if it is row contiguous, otherwise a copy.
class Contiguous {
 public:
  explicit Contiguous(const mx::array &a);
  const char *data() const { return data_; }
  const float *floats() const { return reinterpret_cast<const float *>(data_); }

 private:
  const char *data_;
  std::unique_ptr<char[]> copy_;
};

// Rows along the last axis: in place if each is contiguous, whatever the other strides, otherwise
// a contiguous copy.
class Rows {
 public:
  explicit Rows(const mx::array &a);
  const char *data() const { return data_; }
  int64_t stride(int axis) const { return strides_[axis]; }  // in elements

 private:
  const char *data_;
  mx::Strides strides_;
  std::optional<Contiguous> copy_;
};

using Arrays = std::vector<mx::array>;
// Those inside so many Python objects.
Arrays arrays_of(void **objects, int count);
// The computation of an operation. arrays: inputs, followed by outputs.
using Work = std::function<void(const Arrays &)>;
// Allocates the outputs and sets their strides. inputs: without the weights that the operation
// holds itself.
using Allocate = std::function<void(const Arrays &inputs, Arrays &outputs)>;
// Called by an Allocate: what is dropped once the operation has run or failed, or will never run.
void keep_until_run(std::shared_ptr<void> what);

// True if no other mx::array shares the array's description or its buffer: MLX's condition for
// donating a buffer, besides owning it (a region's buffer is not owned).
bool is_sole_owner(const mx::array &a);

// True if no other mx::array shares the description; the buffer may be shared.
bool is_sole_reference(const mx::array &a);

// True if the array's buffer belongs to a region, see regions.cpp.
bool is_in_region(const mx::array &a);

// Allocates a large output in a region of its own, in which it may grow to 256 MiB or eight times
// its size: what is not touched takes no memory. On huge pages, where the system has them. Returns
// false if it is not large, or if the system refuses.
bool allocate_growing(mx::array &output, const mx::Strides &strides, mx::array::Flags flags);

// Bytes that an array that was allocated so, or that a mapped session begins with, may grow to; 0
// for another.
int64_t bytes_to_grow_in(const mx::array &a);

// Returns to the system the memory behind an array that was allocated so and has had `bytes` bytes
// before.
void release_behind(const mx::array &a, int64_t bytes);

// Strides of a row-contiguous array.
mx::Strides row_strides(const mx::Shape &shape);

// Allocates the buffer of an output. Throws std::bad_alloc, where MLX would go on with NULL.
inline auto memory_for(const mx::array &output) {
  auto memory = mx::allocator::malloc(output.nbytes());
  if (output.size() && !memory.buffer().ptr()) throw std::bad_alloc();
  return memory;
}

// Donates the buffer of `input` to an output of the same shape and dtype if MLX may, or if it was
// allocated to grow and nobody else holds it; otherwise allocates one. Returns whether it was
// donated.
bool reuse_or_allocate(const mx::array &input, mx::array &output);

// Allocates outputs of shape (batch, heads, positions, size) in memory order (batch, positions,
// heads, size), the order in which matrix products read and write heads.
void allocate_by_position(const Arrays &inputs, Arrays &outputs);

// A range of inputs that are weights. If all are evaluated, the operation holds them itself instead
// of passing them to the graph: MLX visits every input of a graph at every step.
struct Weights {
  size_t first = 0, end = 0;
};

// Lazy outputs of an operation on MLX's CPU stream. `work` runs there once the inputs are evaluated
// and the outputs allocated (row contiguous without `allocate`); it is skipped if all outputs are
// empty. in_place: an input, before the weights, whose buffer the last output may take over; -1 for
// none.
Arrays lazy(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, Allocate allocate, Weights weights = {});
Arrays lazy(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, int in_place = -1, Weights weights = {});
mx::array lazy(const char *name, mx::Shape shape, mx::Dtype dtype, Arrays inputs, Work work,
               Allocate allocate = nullptr, Weights weights = {});

// Checks the code that a kernel returned. Throws std::bad_alloc if it was out of memory,
// std::invalid_argument for what it does not support.
void need(int code);

// Runs the body of a function of the C interface: NULL, or the message of what it threw, which is
// valid until the thread's next call.
const char *error_text(const char *what);
template <class Make>
const char *guarded(const Make &make) {
  try {
    make();
    return nullptr;
  } catch (const std::exception &error) {
    return error_text(error.what());
  } catch (...) {
    return error_text("it failed");
  }
}

// As guarded; sets unshared arrays of Python to what `make` returns.
template <class Make>
const char *set_array(void *out, const Make &make) {
  return guarded([&] { array_of(out) = make(); });
}
template <class Make>
const char *set_arrays(void **outs, const Make &make) {
  return guarded([&] {
    for (auto &one : make()) array_of(*outs++) = one;
  });
}

}  // namespace toast

// For the functions of the C interface, which are in no namespace.
using toast::array_if, toast::array_of, toast::arrays_of, toast::set_array, toast::set_arrays;
