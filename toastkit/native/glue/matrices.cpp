#include "matrices.h"

namespace toast {

mx::Dtype add_matrix(Arrays &inputs, const mx::array &weight,
                     const mx::array *scales, const mx::array *biases, const Packing &packing,
                     int64_t columns) {
  const auto [bits, group_size, stack, powers] = packing;
  check(weight.ndim() == (stack ? 3 : 2), "a matrix of another shape");
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
    scales_ = std::make_unique<InOrder>(arrays[first + 1]);
    if (!powers) biases_ = std::make_unique<InOrder>(arrays[first + 2]);
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

}  // namespace toast
