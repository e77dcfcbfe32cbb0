// Products of kernels/ as an MLX primitive: lazy, on MLX's own stream, in its own arrays.
#include <algorithm>

#include "arrays.h"

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

// Of an input x (..., columns) with a matrix (rows, columns); or of x (..., m, columns) with those
// of a stack (experts, rows, columns) that are chosen, uint32 (...), both broadcast.
class Product : public mx::UnaryPrimitive {
 public:
  Product(mx::Stream stream, int bits, int group_size, bool chosen, bool exact,
          std::vector<int> batch)
      : mx::UnaryPrimitive(stream),
        bits_(bits),
        group_size_(group_size),
        chosen_(chosen),
        exact_(exact),
        batch_(std::move(batch)) {}

  void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
    dispatch(stream(), inputs, out,
             [bits = bits_, group_size = group_size_, chosen = chosen_, exact = exact_,
              batch = batch_](const std::vector<mx::array> &arrays) {
               compute(arrays, bits, group_size, chosen, exact, batch);
             });
  }

  void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
    throw std::runtime_error("native products run on the CPU");
  }

  const char *name() const override { return "ToastProduct"; }

 private:
  static void compute(const std::vector<mx::array> &arrays, int bits, int group_size, bool chosen,
                      bool exact, const std::vector<int> &batch) {
    const mx::array &x = arrays[0], &weight = arrays[1];
    mx::array out = arrays.back();
    InOrder rows(x), weights(weight);
    std::unique_ptr<InOrder> scales, biases;
    if (bits) {
      scales = std::make_unique<InOrder>(arrays[2]);
      biases = std::make_unique<InOrder>(arrays[3]);
    }
    const int64_t columns = x.shape(-1);
    const toast_matrix matrix = {
        weights.data(),
        bits ? scales->data() : nullptr,
        bits ? biases->data() : nullptr,
        chosen ? weight.shape(0) : 1,
        weight.shape(-2),
        columns,
        bits,
        group_size,
        type_of(bits ? arrays[2] : weight),
    };
    const toast_vectors vectors = {rows.data(), int64_t(x.size()) / columns, columns, type_of(x)};
    const int64_t count = out.size() / matrix.rows;
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
    if (toast_multiply(&matrix, &vectors, count, chosen ? vector.data() : nullptr,
                       chosen ? expert.data() : nullptr, exact, out.data<char>(), type_of(out)))
      throw std::runtime_error("no memory for a product");
  }

  int bits_, group_size_;
  bool chosen_, exact_;
  std::vector<int> batch_;
};

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

mx::array product(const mx::array &x, const mx::array &weight, const mx::array *scales,
                  const mx::array *biases, const mx::array *choice, int bits, int group_size,
                  bool exact) {
  check(weight.ndim() == (choice ? 3 : 2), "a matrix of another shape");
  check(x.ndim() >= (choice ? 2 : 1), "no vectors");
  const int64_t columns = x.shape(-1), rows = weight.shape(-2);
  std::vector<mx::array> inputs = {x, weight};
  const mx::array &numbers = bits ? *scales : weight;
  if (bits) {
    check(weight.dtype() == mx::uint32, "packed numbers that are no uint32");
    check(weight.shape(-1) * int64_t(32) == columns * bits, "vectors of another length");
    check(group_size && scales->shape() == biases->shape() && scales->ndim() == weight.ndim() &&
              scales->shape(-1) * int64_t(group_size) == columns && scales->shape(-2) == rows &&
              scales->dtype() == biases->dtype(),
          "scales of another shape");
    inputs.push_back(*scales);
    inputs.push_back(*biases);
  } else {
    check(weight.shape(-1) == columns, "vectors of another length");
  }
  type_of(x);
  type_of(numbers);
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
  shape.back() = int(rows);
  auto dtype = x.dtype() == numbers.dtype() ? x.dtype() : mx::float32;
  auto made = std::make_shared<Product>(mx::default_stream(mx::Device::cpu), bits, group_size,
                                        choice != nullptr, exact, std::move(batch));
  return mx::array(std::move(shape), dtype, std::move(made), std::move(inputs));
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, the product. Lazy. choice: whether the last is one.
// Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_product(void *out, void *x, void *weight, void *scales, void *biases,
                                    void *choice, int chosen, int bits, int group_size,
                                    int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    array_of(out) = toast::product(array_of(x), array_of(weight),
                                   bits ? &array_of(scales) : nullptr,
                                   bits ? &array_of(biases) : nullptr,
                                   chosen ? &array_of(choice) : nullptr, bits, group_size,
                                   exact != 0);
  });
}

}  // extern "C"
