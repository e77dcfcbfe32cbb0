// Products of kernels/ as MLX primitives: lazy, on MLX's own stream, in its own arrays.
//
// mlx.core hands out no way to its C++ arrays but its own Python objects. So the objects themselves
// come here, by ctypes, and their arrays are found where nanobind keeps them: 32 bits after the
// object's head say how far from its beginning, and the third of the bits after that whether they
// are there or only a pointer to them. A library that finds them elsewhere is never trusted: see
// probe.py.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace mx = mlx::core;

namespace {

constexpr uint8_t INSIDE = 4;
constexpr int MOST_AXES = 8;
int64_t head = 16;  // bytes of a Python object's head
thread_local std::string said;

mx::array &array_of(void *object) {
  auto start = static_cast<char *>(object);
  int32_t offset;
  memcpy(&offset, start + head, sizeof offset);
  void *there = start + offset;
  if (start[head + 4] & INSIDE) return *static_cast<mx::array *>(there);
  memcpy(&there, there, sizeof there);
  return *static_cast<mx::array *>(there);
}

int type_of(const mx::array &a) {
  if (a.dtype() == mx::float32) return TOAST_F32;
  if (a.dtype() == mx::float16) return TOAST_F16;
  if (a.dtype() == mx::bfloat16) return TOAST_BF16;
  throw std::invalid_argument("a number of a type that the kernels have not");
}

// The numbers of an array in their order: where they lie so, or else a copy.
class InOrder {
 public:
  explicit InOrder(const mx::array &a) {
    if (a.flags().row_contiguous || !a.size()) {
      data_ = a.data<char>();
      return;
    }
    const int64_t item = a.itemsize(), columns = a.shape(-1), step = a.strides(-1);
    copy_.reset(new char[a.nbytes()]);
    data_ = copy_.get();
    char *to = copy_.get();
    std::vector<int64_t> at(a.ndim());
    for (size_t row = 0; row < a.size() / columns; row++) {
      int64_t from = 0;
      for (size_t axis = 0; axis + 1 < a.ndim(); axis++) from += at[axis] * a.strides(axis);
      const char *start = a.data<char>() + from * item;
      if (step == 1) {
        memcpy(to, start, columns * item);
        to += columns * item;
      } else {
        for (int64_t k = 0; k < columns; k++, to += item) memcpy(to, start + k * step * item, item);
      }
      for (int axis = int(a.ndim()) - 2; axis >= 0; axis--) {
        if (++at[axis] < a.shape(axis)) break;
        at[axis] = 0;
      }
    }
  }
  const char *data() const { return data_; }

 private:
  const char *data_;
  std::unique_ptr<char[]> copy_;
};

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
    out.set_data(mx::allocator::malloc(out.nbytes()));
    std::vector<mx::array> arrays;  // whose memory MLX keeps until this has run
    for (auto &one : inputs) arrays.push_back(mx::array::unsafe_weak_copy(one));
    arrays.push_back(mx::array::unsafe_weak_copy(out));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [arrays = std::move(arrays), bits = bits_, group_size = group_size_, chosen = chosen_,
         exact = exact_, batch = batch_] {
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
    if (!out.size()) return;
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

void check(bool holds, const char *what) {
  if (!holds) throw std::invalid_argument(what);
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

extern "C" {

TOAST_API void toast_set_head(int64_t bytes) { head = bytes; }

// What is found of an array: axes, and then sizes, the bytes of a number, their count. 0 where
// there is nothing that could be one.
TOAST_API int toast_describe(void *object, int64_t *about) {
  auto start = static_cast<char *>(object);
  int32_t offset;
  memcpy(&offset, start + head, sizeof offset);
  if (offset < head + 8 || offset > head + 64) return 0;
  const mx::array &a = array_of(object);
  if (a.ndim() > MOST_AXES) return 0;
  *about++ = a.ndim();
  for (int size : a.shape()) *about++ = size;
  *about++ = a.itemsize();
  *about++ = a.size();
  return 1;
}

// Makes `out`, an array that nobody else has, the product. Lazy. choice: whether the last is one.
// Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_product(void *out, void *x, void *weight, void *scales, void *biases,
                                    void *choice, int chosen, int bits, int group_size,
                                    int exact) {
  try {
    array_of(out) = product(array_of(x), array_of(weight), bits ? &array_of(scales) : nullptr,
                            bits ? &array_of(biases) : nullptr,
                            chosen ? &array_of(choice) : nullptr, bits, group_size, exact != 0);
    return nullptr;
  } catch (const std::exception &error) {
    said = error.what();
  } catch (...) {
    said = "it failed";
  }
  return said.c_str();
}
}
