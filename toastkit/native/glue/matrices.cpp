#include "matrices.h"

#include "../kernels/rows.h"

namespace toast {

GivenPart part_of(const toast_operands &given, int i) {
  void *const *part = given.parts + 4 * i;
  return {array_if(part[0]), array_if(part[1]), array_if(part[2]), array_if(part[3]),
          given.packing[2 * i], given.packing[2 * i + 1]};
}

const mx::array &rest_of(const toast_operands &given, int i) { return array_of(given.rest[i]); }

Packing add_part(Arrays &inputs, const GivenPart &part, int64_t columns, bool stack) {
  const mx::array &weight = *part.weight, *scales = part.scales, *biases = part.biases;
  const int bits = part.bits, group_size = part.group_size;
  const bool powers = bits && !biases;
  check(weight.ndim() == (stack ? 3 : 2) && columns > 0, "a matrix of another shape");
  inputs.push_back(weight);
  if (!bits) {
    check(weight.shape(-1) == columns, "vectors of another length");
    type_of(weight);
  } else {
    check(weight.dtype() == mx::uint32, "packed numbers that are no uint32");
    check(weight.shape(-1) * int64_t(32) == columns * bits, "vectors of another length");
    check(group_size && scales && scales->ndim() == weight.ndim() &&
              scales->shape(-1) * int64_t(group_size) == columns &&
              scales->shape(-2) == weight.shape(-2) && scales->shape(0) == weight.shape(0),
          "scales of another shape");
    inputs.push_back(*scales);
  }
  if (powers) {
    check(scales->dtype() == mx::uint8 && bits == 4 && group_size == 32, "no biases");
  } else if (bits) {
    check(biases->shape() == scales->shape() && biases->dtype() == scales->dtype(),
          "biases of another shape");
    type_of(*scales);
    inputs.push_back(*biases);
  }
  if (part.bias) {
    auto rows = weight.shape();
    rows.pop_back();
    check(part.bias->shape() == rows && part.bias->dtype() == mx::float32,
          "a bias of another shape");
    inputs.push_back(*part.bias);
  }
  const bool wide = !powers && (bits ? *scales : weight).dtype() != inputs[0].dtype();
  return {bits, group_size, stack, powers, part.bias != nullptr, wide};
}

Part::Part(const Arrays &arrays, size_t &at, const Packing &packing) {
  const auto [bits, group_size, stack, powers, biased, wide] = packing;
  const mx::array &weight = arrays[at], &numbers = arrays[bits ? at + 1 : at];
  auto next = [&] { return held_.emplace_back(arrays[at++]).data(); };
  held_.reserve(4);
  const int64_t columns = bits ? weight.shape(-1) * int64_t(32) / bits : weight.shape(-1);
  const int type = powers ? TOAST_E8M0 : type_of(numbers);
  const void *codes = next(), *scales = bits ? next() : nullptr;
  const void *biases = bits && !powers ? next() : nullptr;
  matrix = {codes, scales, biases, stack ? weight.shape(0) : 1, weight.shape(-2), columns, bits,
            group_size, type};
  if (biased) bias = reinterpret_cast<const float *>(next());
}

toast_matrix Part::slice(int64_t first, int64_t rows) const {
  toast_matrix some = matrix;
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
    matrices.push_back(r.part.slice(r.first, r.rows ? r.rows : r.part.matrix.rows));
    products.push_back(
        {&matrices.back(), &x, count, which, expert, activation_bits, r.out, r.out_type});
  }
  need(toast_multiply_all(products.data(), int32_t(products.size())));
  for (const Result &r : results)
    if (const float *bias = r.part.bias)
      need(toast_add_rows(static_cast<float *>(r.out), r.vectors.count,
                          r.rows ? r.rows : r.part.matrix.rows, bias + r.first,
                          r.part.matrix.experts, r.vectors.expert));
}

}  // namespace toast
