// What all primitives of this folder have in common: arrays of Python's, their types, their
// memory.
#pragma once

#include <stdint.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"

namespace mx = mlx::core;

namespace toast {

// The array that a Python object of mlx.core holds.
mx::array &array_of(void *object);
// The same; NULL for no object.
inline const mx::array *array_if(void *object) { return object ? &array_of(object) : nullptr; }

// The type of numbers that the kernels know it by. Raises std::invalid_argument for another.
int type_of(const mx::array &a);

// As `type_of`, and what keys and values alone may be: rows of bytes, TOAST_I8.
int kept_type(const mx::array &a);

// The numbers of a row of keys or values, behind which there may be a scale.
int row_size(const mx::array &a);

// Raises std::invalid_argument with `what`, unless it holds.
void check(bool holds, const char *what);

// The numbers of an array in their order: where they lie so, or else a copy.
class InOrder {
 public:
  explicit InOrder(const mx::array &a);
  const char *data() const { return data_; }
  const float *floats() const { return reinterpret_cast<const float *>(data_); }

 private:
  const char *data_;
  std::unique_ptr<char[]> copy_;
};

using Arrays = std::vector<mx::array>;
// Computes: arrays are the inputs, and then the outputs.
using Work = std::function<void(const Arrays &)>;
// Gives outputs memory, as they are to lie there. inputs: without weights that are there.
using LayOut = std::function<void(const Arrays &inputs, Arrays &outputs)>;

// Whether nobody else has an array, or its memory. That is what MLX asks of one whose memory it is
// to write to; it must own that memory too, which it does not where that is a region's.
bool is_sole(const mx::array &a);

// Whether nobody else has an array; its memory somebody may have.
bool is_held_once(const mx::array &a);

// Whether an array's memory is a region's: see regions.cpp.
bool is_in_region(const mx::array &a);

// Gives an output the memory of an input of its size, if nobody else has that; else its own, in
// rows. Whether it could.
bool lie_in_place(const mx::array &input, mx::array &output);

// Heads (batch, heads, positions, size) lie as (batch, positions, heads, size), as products give
// and take them.
void lie_by_position(const Arrays &inputs, Arrays &outputs);

// Inputs side by side in whose memory nothing ever lies. Where all are there, the operation holds
// them itself: MLX looks at each input of a graph, at each step, and keeps account of it.
struct Weights {
  size_t first = 0, end = 0;
};

// What an operation of the CPU gives, lazy. `work` runs on MLX's stream, when the inputs are there,
// with memory for the outputs, in rows where no `lay_out` is given; not for outputs of no numbers.
// in_place: an input before the weights, of the last output's size, in whose memory that may lie if
// nobody else has it; -1 for none.
Arrays made(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, LayOut lay_out, Weights weights = {});
Arrays made(const char *name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype> &dtypes,
            Arrays inputs, Work work, int in_place = -1, Weights weights = {});
mx::array made(const char *name, mx::Shape shape, mx::Dtype dtype, Arrays inputs, Work work,
               LayOut lay_out = nullptr, Weights weights = {});

// Of what a kernel returns. Raises std::runtime_error where it had no memory.
void need(int code);

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
