// Matrices of weights as MLX arrays: one, or, where it is packed, three.
#pragma once

#include "arrays.h"

extern "C" {

// Arrays as Python gives them. parts: weight, scales, biases of groups and bias of each, NULL for
// what it has not; packing: bits and group size of each. rest: what there is beside parts.
typedef struct {
  void *const *parts;
  const int *packing;
  void *const *rest;
  int32_t activation_bits;
} toast_operands;

}  // extern "C"

namespace toast {

// bits: 0 for one that is not packed. stack: (experts, rows, columns), not (rows, columns). powers:
// no biases; scales are powers of two (TOAST_E8M0).
struct Packing {
  Packing() = default;
  Packing(int bits, int group_size, bool stack, const void *biases)
      : bits(bits), group_size(group_size), stack(stack), powers(bits && !biases) {}
  int bits, group_size;
  bool stack, powers;
};

// The arrays of a matrix for vectors of so many columns, added to `inputs`. The last two of NULL
// for one that is not packed. Returns the dtype of its numbers, of powers that of the
// vectors, which are the first of inputs. Raises std::invalid_argument for arrays that are none.
mx::Dtype add_matrix(Arrays &inputs, const mx::array &weight,
                     const mx::array *scales, const mx::array *biases, const Packing &packing,
                     int64_t columns);

// Such arrays where they lie, from `first` on, when they are computed.
class Matrix {
 public:
  Matrix(const Arrays &arrays, size_t first, const Packing &packing);
  const toast_matrix *operator->() const { return &matrix_; }
  const toast_matrix *get() const { return &matrix_; }
  static size_t count(const Packing &packing) { return packing.bits ? 3 - packing.powers : 1; }

 private:
  InOrder weight_;
  std::unique_ptr<InOrder> scales_, biases_;
  toast_matrix matrix_;
};

constexpr int GIVEN = 4;  // arrays of a part

// As add_matrix, of a part; those that are not there are NULL. Its bias is float32.
mx::Dtype add_part(Arrays &inputs, const mx::array *const (&part)[GIVEN], const Packing &packing,
                   int64_t columns);

// Part i of those that are given; its arrays become `part`.
Packing part_of(const toast_operands &given, int i, bool &biased, const mx::array *(&part)[GIVEN],
                bool stack = false);

// Array i beside parts.
const mx::array &rest_of(const toast_operands &given, int i);

// A matrix with what is added to its products. at: where its arrays begin, and then where they end.
struct Part {
  Part(const Arrays &arrays, size_t &at, const Packing &packing, bool biased);
  // So many of its rows, from `first` on.
  toast_matrix from(int64_t first, int64_t rows) const;
  // What is added; NULL for nothing.
  const float *bias() const {
    return bias_ ? bias_->floats() : nullptr;
  }
  Matrix matrix;

 private:
  std::unique_ptr<InOrder> bias_;
};

// So many of `x` as products take them: those that `which` names, with what `expert` names of
// stacks, `count` each; NULL for all, and for no stacks.
struct Vectors {
  toast_vectors x;
  int64_t count;
  const uint32_t *which = nullptr, *expert = nullptr;
};

// Products with some of a part's rows, from `first` on; with all of them. out: (count, rows),
// float32 where there is a bias, of which all rows are then `rows`.
struct Result {
  const Vectors &vectors;
  const Part &part;
  void *out;
  int out_type = TOAST_F32;
  int64_t first = 0, rows = 0;
};

// Those that wait for nothing of each other, as toast_multiply_all.
void multiply(int activation_bits, const std::vector<Result> &results);

}  // namespace toast
