// Weight matrices as MLX arrays: one array, or weight, scales and biases of a quantised matrix.
#pragma once

#include "arrays.h"

extern "C" {

// Operands as Python passes them. parts: weight, scales, group biases and bias of each matrix, NULL
// for those it lacks; packing: bits and group size of each. rest: all other arrays.
typedef struct {
  void *const *parts;
  const int *packing;
  void *const *rest;
  int32_t activation_bits;
} toast_operands;

}  // extern "C"

namespace toast {

// The arrays of a matrix and its bias, NULL where absent, and how the matrix is packed.
struct GivenPart {
  const mx::array *weight, *scales, *biases, *bias;
  int bits, group_size;
};

// Part i of `given`.
GivenPart part_of(const toast_operands &given, int i);

// given.rest[i], which must not be NULL.
const mx::array &rest_of(const toast_operands &given, int i);

// How a matrix and its bias are stored. bits: 0 for a float matrix. stack: of shape (experts, rows,
// columns) rather than (rows, columns). powers: mxfp4, with scales that are powers of two
// (TOAST_E8M0) and no group biases. biased: with a bias. wide: products of x are float32, as the
// matrix has another dtype: that of its scales, unless they are powers.
struct Packing {
  int bits, group_size;
  bool stack, powers, biased, wide;
};

// Appends the arrays of a part with `columns` columns to `inputs`, of which the first is x. Throws
// std::invalid_argument for arrays that do not fit together.
Packing add_part(Arrays &inputs, const GivenPart &part, int64_t columns, bool stack = false);

// A matrix and its bias while they are computed with. at: index of the first array; advanced past
// the last.
class Part {
 public:
  Part(const Arrays &arrays, size_t &at, const Packing &packing);
  // Rows [first, first + rows).
  toast_matrix slice(int64_t first, int64_t rows) const;
  toast_matrix matrix;
  const float *bias = nullptr;  // float32 (rows,); NULL without one

 private:
  std::vector<Contiguous> held_;
};

// The `count` vectors of a product. which: the row of x of each; NULL for all rows in order.
// expert: the matrix of a stack that each is multiplied by; NULL for a single matrix.
struct Vectors {
  toast_vectors x;
  int64_t count;
  const uint32_t *which = nullptr, *expert = nullptr;
};

// Products of vectors with rows [first, first + rows) of a part; rows = 0 for all. out: (count,
// rows), float32 if there is a bias.
struct Result {
  const Vectors &vectors;
  const Part &part;
  void *out;
  int out_type = TOAST_F32;
  int64_t first = 0, rows = 0;
};

// Computes independent products together, see toast_multiply_all.
void multiply(int activation_bits, const std::vector<Result> &results);

}  // namespace toast
