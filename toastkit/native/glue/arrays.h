// What all primitives of this folder have in common: arrays of Python's, their types, their
// memory.
#pragma once

#include <stdint.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace mx = mlx::core;

namespace toast {

// The array that a Python object of mlx.core holds.
mx::array &array_of(void *object);

// The type of numbers that the kernels know it by. Raises std::invalid_argument for another.
int type_of(const mx::array &a);

// Raises std::invalid_argument with `what`, unless it holds.
void check(bool holds, const char *what);

// The numbers of an array in their order: where they lie so, or else a copy.
class InOrder {
 public:
  explicit InOrder(const mx::array &a);
  const char *data() const { return data_; }

 private:
  const char *data_;
  std::unique_ptr<char[]> copy_;
};

// Has `work` run when the inputs are there, on the stream's thread, with the memory of `out` made,
// in rows unless it is there already.
// work(arrays): the inputs, and then the output. The memory of all is kept until it has run.
template <class Work>
void dispatch(const mx::Stream &stream, const std::vector<mx::array> &inputs, mx::array &out,
              Work work) {
  if (out.data_shared_ptr() == nullptr) out.set_data(mx::allocator::malloc(out.nbytes()));
  std::vector<mx::array> arrays;
  for (auto &one : inputs) arrays.push_back(mx::array::unsafe_weak_copy(one));
  arrays.push_back(mx::array::unsafe_weak_copy(out));
  mx::cpu::get_command_encoder(stream).dispatch(
      [arrays = std::move(arrays), work = std::move(work)] {
        if (arrays.back().size()) work(arrays);
      });
}

// What a function of the C interface returns: what is wrong, or NULL where `make` does not raise.
const char *wrong_with(const char *what);
template <class Make>
const char *wrong(const Make &make) {
  try {
    make();
    return nullptr;
  } catch (const std::exception &error) {
    return wrong_with(error.what());
  } catch (...) {
    return wrong_with("it failed");
  }
}

}  // namespace toast
