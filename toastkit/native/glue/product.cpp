// Matrix products and embedding lookups of (quantised) matrices as MLX primitives.
#include <algorithm>
#include <limits>

#include "matrices.h"

namespace toast {
namespace {

// For each index of `shape`, the flat index of the element of `a` that is broadcast to it. skip:
// trailing axes of `a` that do not take part.
std::vector<uint32_t> places_of(const mx::array &a, size_t skip, const std::vector<int> &shape) {
  const size_t axes = a.ndim() - skip, more = shape.size() - axes;
  size_t count = 1;
  for (int size : shape) count *= size;
  std::vector<uint32_t> places(count);
  for (size_t i = 0; i < count; i++) {
    size_t rest = i, place = 0, step = 1;
    for (size_t axis = shape.size(); axis-- > more;) {
      const size_t at = rest % shape[axis], size = a.shape(int(axis - more));
      rest /= shape[axis];
      place += size == 1 ? 0 : at * step;
      step *= size;
    }
    places[i] = uint32_t(place);
  }
  return places;
}

void multiply(const Arrays &arrays, const Packing &packing, int activation_bits,
              const std::vector<int> &batch) {
  const mx::array &x = arrays[0];
  const bool chosen = packing.stack;
  mx::array out = arrays.back();
  Contiguous rows(x);
  size_t next = 1;
  const Part part(arrays, next, packing);
  const int64_t columns = x.shape(-1);
  const toast_vectors vectors = {rows.data(), int64_t(x.size()) / columns, columns, type_of(x)};
  const int64_t count = out.size() / part.matrix.rows;
  if (packing.biased) {
    const Vectors all = {vectors, count};
    return toast::multiply(activation_bits, {{all, part, out.data<char>()}});
  }
  std::vector<uint32_t> vector, expert;
  if (chosen) {
    const mx::array &choice = arrays[arrays.size() - 2];
    Contiguous experts(choice);
    auto of = reinterpret_cast<const uint32_t *>(experts.data());
    auto places = places_of(x, 2, batch), choices = places_of(choice, 0, batch);
    const uint32_t each = x.shape(-2);
    for (size_t i = 0; i < places.size(); i++)
      for (uint32_t j = 0; j < each; j++) {
        vector.push_back(places[i] * each + j);
        expert.push_back(of[choices[i]]);
      }
  }
  need(toast_multiply(&part.matrix, &vectors, count, chosen ? vector.data() : nullptr,
                      chosen ? expert.data() : nullptr, activation_bits, out.data<char>(),
                      type_of(out)));
}

std::vector<int> broadcast(const mx::array &x, const mx::array &choice) {
  const size_t axes = x.ndim() - 2, all = std::max(axes, choice.ndim());
  std::vector<int> shape(all);
  for (size_t i = 0; i < all; i++) {  // from the last
    int a = i < axes ? x.shape(int(axes - 1 - i)) : 1;
    int b = i < choice.ndim() ? choice.shape(int(choice.ndim() - 1 - i)) : 1;
    check(a == b || a == 1 || b == 1, "experts that are chosen for other vectors");
    shape[all - 1 - i] = a == 1 ? b : a;
  }
  return shape;
}

// x (..., columns) times a matrix (rows, columns), transposed, plus an optional bias (rows,), both
// then float32. Or x (..., m, columns) times the matrices of a stack (experts, rows, columns) named
// by choice, uint32 (...); the leading axes are broadcast.
mx::array product(const mx::array &x, const mx::array &weight, const mx::array *scales,
                  const mx::array *biases, const mx::array *bias, const mx::array *choice,
                  int bits, int group_size, int activation_bits) {
  check(x.ndim() >= (choice ? 2 : 1), "no vectors");
  check(!bias || (!choice && x.dtype() == mx::float32), "a bias of other products");
  Arrays inputs = {x};
  type_of(x);
  const GivenPart part = {&weight, scales, biases, bias, bits, group_size};
  const Packing packing = add_part(inputs, part, x.shape(-1), choice != nullptr);
  const Weights weights = {1, inputs.size()};
  auto shape = x.shape();
  std::vector<int> batch;
  if (choice) {
    check(choice->dtype() == mx::uint32, "experts that are no uint32");
    batch = broadcast(x, *choice);
    shape = mx::Shape();
    for (int size : batch) shape.push_back(size);
    shape.push_back(x.shape(-2));
    shape.push_back(0);
    inputs.push_back(*choice);
  }
  shape.back() = weight.shape(-2);
  auto dtype = packing.wide ? mx::float32 : x.dtype();
  return lazy(
      "ToastProduct", std::move(shape), dtype, std::move(inputs),
      [packing, activation_bits, batch = std::move(batch)](const Arrays &arrays) {
        multiply(arrays, packing, activation_bits, batch);
      },
      nullptr, weights);
}

float number_at(const toast_matrix &m, const void *numbers, int64_t i) {
  if (m.type == TOAST_F32) return static_cast<const float *>(numbers)[i];
  const uint16_t bits = static_cast<const uint16_t *>(numbers)[i];
  if (m.type == TOAST_F16) return float(reinterpret_cast<const mx::float16_t &>(bits));
  return float(reinterpret_cast<const mx::bfloat16_t &>(bits));
}

// Dequantises a row, rounding as MLX does: after the product with the scale and after the sum.
void widen(const toast_matrix &m, int64_t row, float *out) {
  const int64_t first = row * m.columns;
  if (!m.bits) {
    for (int64_t k = 0; k < m.columns; k++) out[k] = number_at(m, m.weight, first + k);
    return;
  }
  const uint8_t *packed = static_cast<const uint8_t *>(m.weight) + first * m.bits / 8;
  const int64_t bytes = m.columns * m.bits / 8;
  float scale = 0, bias = 0;
  for (int64_t k = 0; k < m.columns; k++) {
    if (k % m.group_size == 0) {
      scale = number_at(m, m.scales, (first + k) / m.group_size);
      bias = number_at(m, m.biases, (first + k) / m.group_size);
    }
    const int64_t at = k * m.bits / 8;
    const uint32_t two = packed[at] | (at + 1 < bytes ? packed[at + 1] << 8 : 0);
    const uint32_t number = two >> (k * m.bits % 8) & ((1u << m.bits) - 1);
    out[k] = float(double(scale) * number) + bias;  // exact, then rounded: nothing to contract
  }
}

// Embedding lookup: float32 rows (..., columns) of a matrix; NaN for places beyond its rows.
mx::array rows_at(const mx::array &places, const mx::array &weight, const mx::array *scales,
                  const mx::array *biases, int bits, int group_size) {
  check(places.dtype() == mx::uint32, "places that are no uint32");
  check(weight.ndim() == 2 && (!bits || biases), "a matrix of another shape");
  const int64_t columns = bits ? weight.shape(-1) * int64_t(32) / bits : weight.shape(-1);
  Arrays inputs = {places};
  const GivenPart part = {&weight, scales, biases, nullptr, bits, group_size};
  const Packing packing = add_part(inputs, part, columns);
  auto shape = places.shape();
  shape.push_back(int(columns));
  return lazy("ToastRows", std::move(shape), mx::float32, std::move(inputs),
              [packing](const Arrays &arrays) {
    size_t next = 1;
    const Part part(arrays, next, packing);
    const toast_matrix &matrix = part.matrix;
    Contiguous places(arrays[0]);
    auto rows = reinterpret_cast<const uint32_t *>(places.data());
    mx::array out = arrays.back();
    float *to = out.data<float>();
    for (size_t i = 0; i < arrays[0].size(); i++, to += matrix.columns) {
      if (rows[i] < matrix.rows) {
        widen(matrix, rows[i], to);
      } else {
        std::fill_n(to, matrix.columns, std::numeric_limits<float>::quiet_NaN());
      }
    }
  });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to the product. Lazy. scales, biases: NULL for a float matrix.
// bias, choice: or NULL. Returns an error message or NULL.
TOAST_API const char *toast_product_array(void *out, void *x, void *weight, void *scales,
                                          void *biases, void *bias, void *choice, int bits,
                                          int group_size, int activation_bits) {
  return set_array(out, [&] {
    return toast::product(array_of(x), array_of(weight), array_if(scales), array_if(biases),
                          array_if(bias), array_if(choice), bits, group_size, activation_bits);
  });
}

// Sets `out`, an unshared array, to float32 rows of a matrix. Lazy. scales, biases: NULL for a
// float matrix. Returns as above.
TOAST_API const char *toast_rows_array(void *out, void *places, void *weight, void *scales,
                                       void *biases, int bits, int group_size) {
  return set_array(out, [&] {
    return toast::rows_at(array_of(places), array_of(weight), array_if(scales), array_if(biases),
                          bits, group_size);
  });
}

}  // extern "C"
