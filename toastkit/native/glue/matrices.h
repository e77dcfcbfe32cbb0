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

// How a matrix is stored. bits: 0 for a float matrix. stack: of shape (experts, rows, columns)
// rather than (rows, columns). powers: mxfp4, with scales that are powers of two (TOAST_E8M0) and
// no biases.
struct Packing {
  Packing() = default;
  Packing(int bits, int group_size, bool stack, const void *biases)
      : bits(bits), group_size(group_size), stack(stack), powers(bits && !biases) {}
  int bits, group_size;
  bool stack, powers;
};

// Appends the arrays of a matrix with `columns` columns to `inputs`, of which the first is x.
// scales, biases: NULL for a float matrix. Returns the matrix's dtype: that of the scales, for
// mxfp4 that of x. Throws std::invalid_argument for arrays that do not fit together.
mx::Dtype add_matrix(Arrays &inputs, const mx::array &weight,
                     const mx::array *scales, const mx::array *biases, const Packing &packing,
                     int64_t columns);

// The matrix that those arrays hold, from arrays[first] on, while it is computed with.
class Matrix {
 public:
  Matrix(const Arrays &arrays, size_t first, const Packing &packing);
  const toast_matrix *operator->() const { return &matrix_; }
  const toast_matrix *get() const { return &matrix_; }
  static size_t count(const Packing &packing) { return packing.bits ? 3 - packing.powers : 1; }

 private:
  Contiguous weight_;
  std::unique_ptr<Contiguous> scales_, biases_;
  toast_matrix matrix_;
};

constexpr int GIVEN = 4;  // arrays of a part: weight, scales, group biases, bias

// As add_matrix, for a matrix and its float32 bias. Absent arrays are NULL.
mx::Dtype add_part(Arrays &inputs, const mx::array *const (&part)[GIVEN], const Packing &packing,
                   int64_t columns);

// How part i of `given` is stored; sets `part` to its arrays.
Packing part_of(const toast_operands &given, int i, bool &biased, const mx::array *(&part)[GIVEN],
                bool stack = false);

// given.rest[i], which must not be NULL.
const mx::array &rest_of(const toast_operands &given, int i);

// A matrix and its bias. at: index of its first array; advanced past its last.
struct Part {
  Part(const Arrays &arrays, size_t &at, const Packing &packing, bool biased);
  // Rows [first, first + rows).
  toast_matrix slice(int64_t first, int64_t rows) const;
  // float32 (rows,); NULL without a bias.
  const float *bias() const {
    return bias_ ? bias_->floats() : nullptr;
  }
  Matrix matrix;

 private:
  std::unique_ptr<Contiguous> bias_;
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
