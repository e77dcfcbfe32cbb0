// Products of kernels/ as an MLX primitive: lazy, on MLX's own stream, in its own arrays.
#include <algorithm>

#include "matrices.h"

namespace toast {
namespace {

// The place in an array's leading axes, as in one string, of each place in axes that they are
// broadcast to. skip: axes of it that are not led by.
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

void multiply(const Arrays &arrays, const Packing &packing, bool exact,
              const std::vector<int> &batch) {
  const mx::array &x = arrays[0];
  const bool chosen = packing.stack;
  mx::array out = arrays.back();
  InOrder rows(x);
  const Matrix matrix(arrays, 1, packing);
  const int64_t columns = x.shape(-1);
  const toast_vectors vectors = {rows.data(), int64_t(x.size()) / columns, columns, type_of(x)};
  const int64_t count = out.size() / matrix->rows;
  std::vector<uint32_t> vector, expert;
  if (chosen) {
    const mx::array &choice = arrays[arrays.size() - 2];
    InOrder experts(choice);
    auto of = reinterpret_cast<const uint32_t *>(experts.data());
    auto places = places_of(x, 2, batch), choices = places_of(choice, 0, batch);
    const uint32_t each = x.shape(-2);
    for (size_t i = 0; i < places.size(); i++)
      for (uint32_t j = 0; j < each; j++) {
        vector.push_back(places[i] * each + j);
        expert.push_back(of[choices[i]]);
      }
  }
  need(toast_multiply(matrix.get(), &vectors, count, chosen ? vector.data() : nullptr,
                      chosen ? expert.data() : nullptr, exact, out.data<char>(), type_of(out)));
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

// Of an input x (..., columns) with a matrix (rows, columns); or of x (..., m, columns) with those
// of a stack (experts, rows, columns) that are chosen, uint32 (...), both broadcast.
mx::array product(const mx::array &x, const mx::array &weight, const mx::array *scales,
                  const mx::array *biases, const mx::array *choice, int bits, int group_size,
                  bool exact) {
  check(x.ndim() >= (choice ? 2 : 1), "no vectors");
  const Packing packing(bits, group_size, choice != nullptr, biases);
  Arrays inputs = {x};
  type_of(x);
  const auto numbers = add_matrix(inputs, weight, scales, biases, packing, x.shape(-1));
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
  auto dtype = x.dtype() == numbers ? x.dtype() : mx::float32;
  return made("ToastProduct", std::move(shape), dtype, std::move(inputs),
              [packing, exact, batch = std::move(batch)](const Arrays &arrays) {
    multiply(arrays, packing, exact, batch);
  });
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, the product. Lazy. scales, biases: of a packed
// matrix. choice: NULL, or experts. Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_product_array(void *out, void *x, void *weight, void *scales,
                                          void *biases, void *choice, int bits, int group_size,
                                          int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    array_of(out) = toast::product(array_of(x), array_of(weight),
                                   scales ? &array_of(scales) : nullptr,
                                   biases ? &array_of(biases) : nullptr,
                                   choice ? &array_of(choice) : nullptr, bits, group_size,
                                   exact != 0);
  });
}

}  // extern "C"
