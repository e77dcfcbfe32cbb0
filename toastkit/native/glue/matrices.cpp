#include "matrices.h"

#include "../kernels/rows.h"

namespace toast {

mx::Dtype add_matrix(Arrays &inputs, const mx::array &weight,
                     const mx::array *scales, const mx::array *biases, const Packing &packing,
                     int64_t columns) {
  const auto [bits, group_size, stack, powers] = packing;
  check(weight.ndim() == (stack ? 3 : 2) && columns > 0, "a matrix of another shape");
  inputs.push_back(weight);
  if (!bits) {
    check(weight.shape(-1) == columns, "vectors of another length");
    type_of(weight);
    return weight.dtype();
  }
  check(weight.dtype() == mx::uint32, "packed numbers that are no uint32");
  check(weight.shape(-1) * int64_t(32) == columns * bits, "vectors of another length");
  check(group_size && scales && scales->ndim() == weight.ndim() &&
            scales->shape(-1) * int64_t(group_size) == columns &&
            scales->shape(-2) == weight.shape(-2) && scales->shape(0) == weight.shape(0),
        "scales of another shape");
  inputs.push_back(*scales);
  if (powers) {
    check(scales->dtype() == mx::uint8 && bits == 4 && group_size == 32, "no biases");
    return inputs[0].dtype();
  }
  check(biases->shape() == scales->shape() && biases->dtype() == scales->dtype(),
        "biases of another shape");
  type_of(*scales);
  inputs.push_back(*biases);
  return scales->dtype();
}

Matrix::Matrix(const Arrays &arrays, size_t first, const Packing &packing)
    : weight_(arrays[first]) {
  const mx::array &weight = arrays[first];
  const auto [bits, group_size, stack, powers] = packing;
  int64_t columns = weight.shape(-1);
  if (bits) {
    scales_ = std::make_unique<Contiguous>(arrays[first + 1]);
    if (!powers) biases_ = std::make_unique<Contiguous>(arrays[first + 2]);
    columns = columns * 32 / bits;
  }
  matrix_ = {
      weight_.data(),
      bits ? scales_->data() : nullptr,
      biases_ ? biases_->data() : nullptr,
      stack ? weight.shape(0) : 1,
      weight.shape(-2),
      columns,
      bits,
      group_size,
      powers ? TOAST_E8M0 : type_of(bits ? arrays[first + 1] : weight),
  };
}

mx::Dtype add_part(Arrays &inputs, const mx::array *const (&part)[GIVEN], const Packing &packing,
                   int64_t columns) {
  const auto [weight, scales, biases, bias] = part;
  const auto numbers = add_matrix(inputs, *weight, scales, biases, packing, columns);
  if (bias) {
    auto rows = weight->shape();
    rows.pop_back();
    check(bias->shape() == rows && bias->dtype() == mx::float32, "a bias of another shape");
    inputs.push_back(*bias);
  }
  return numbers;
}

Packing part_of(const toast_operands &given, int i, bool &biased, const mx::array *(&part)[GIVEN],
                bool stack) {
  void *const *objects = given.parts + GIVEN * i;
  for (int j = 0; j < GIVEN; j++) part[j] = array_if(objects[j]);
  biased = objects[GIVEN - 1];
  return {given.packing[2 * i], given.packing[2 * i + 1], stack, objects[2]};
}

const mx::array &rest_of(const toast_operands &given, int i) { return array_of(given.rest[i]); }

Part::Part(const Arrays &arrays, size_t &at, const Packing &packing, bool biased)
    : matrix(arrays, at, packing) {
  at += Matrix::count(packing);
  if (biased) bias_ = std::make_unique<Contiguous>(arrays[at++]);
}

toast_matrix Part::slice(int64_t first, int64_t rows) const {
  toast_matrix some = *matrix.get();
  const int64_t packed = some.bits ? some.columns * some.bits / 8 : 0;
  const int64_t size = toast_type_bytes(some.type);
  auto at = [&](const void *p, int64_t row) {
    return static_cast<const void *>(static_cast<const char *>(p) + first * row);
  };
  some.weight = at(some.weight, packed ? packed : some.columns * size);
  if (packed) some.scales = at(some.scales, some.columns / some.group_size * size);
  if (some.biases) some.biases = at(some.biases, some.columns / some.group_size * size);
  some.rows = rows;
  return some;
}

void multiply(int activation_bits, const std::vector<Result> &results) {
  std::vector<toast_matrix> matrices;
  std::vector<toast_product> products;
  matrices.reserve(results.size()), products.reserve(results.size());
  for (const Result &r : results) {
    const auto &[x, count, which, expert] = r.vectors;
    matrices.push_back(r.part.slice(r.first, r.rows ? r.rows : r.part.matrix->rows));
    products.push_back(
        {&matrices.back(), &x, count, which, expert, activation_bits, r.out, r.out_type});
  }
  need(toast_multiply_all(products.data(), int32_t(products.size())));
  for (const Result &r : results)
    if (const float *bias = r.part.bias())
      need(toast_add_rows(static_cast<float *>(r.out), r.vectors.count,
                          r.rows ? r.rows : r.part.matrix->rows, bias + r.first,
                          r.part.matrix->experts, r.vectors.expert));
}

}  // namespace toast
