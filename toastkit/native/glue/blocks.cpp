// What lies in a layer before its attention and behind it, as MLX primitives: the kernels of norms,
// products and gates one after another, to the bit what these give in float32 as operations.
#include "blocks.h"

#include <algorithm>
#include <numeric>

#include "../kernels/rows.h"

namespace toast {
namespace {

void add_norm(Arrays &inputs, const mx::array &weight, int64_t length) {
  check(weight.shape() == mx::Shape{int(length)}, "a weight of another length");
  type_of(weight);
  inputs.push_back(weight);
}

// One of the parts before attention and the one behind it; its rows.
int add_one(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int64_t columns) {
  const mx::array *part[GIVEN];
  layer.packing[i] = part_of(given, i, layer.biased[i], part);
  add_part(inputs, part, layer.packing[i], columns);
  return part[0]->shape(-2);
}

// Of x (count, columns), float32; may be in place.
void norm(const mx::array &weight, float eps, const float *x, int64_t count, int64_t columns,
          float *out) {
  InOrder weights(weight);
  const toast_vectors rows = {x, count, columns, TOAST_F32};
  need(toast_rms_norm(&rows, columns, weights.data(), type_of(weight), 0, eps, out, TOAST_F32));
}

}  // namespace

void check_rows(const mx::array &x) {
  check(x.ndim() == 3 && x.dtype() == mx::float32, "positions of another shape");
}

void add_before(Arrays &inputs, Layer &layer, const toast_operands &given) {
  const int64_t columns = inputs[0].shape(-1);
  const int heads[HEADS] = {layer.is.heads, layer.is.key_heads, layer.is.key_heads};
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, rest_of(given, 0), columns);
  for (int i = 0; layer.is.normed && i < 2; i++) inputs.push_back(rest_of(given, 2 + i));
  for (int i = 0; i < HEADS; i++) {
    const int all = add_one(inputs, layer, i, given, columns);
    const int parts = heads[i] * (!i && layer.is.gated ? 2 : 1);
    check(parts > 0 && all > 0 && all % parts == 0, "heads of other sizes");
    layer.size[i] = all / parts;
    const int rows = layer.size[i] * heads[i];
    if (!layer.is.normed || i == 2) continue;
    const mx::array &norm = rest_of(given, 2 + i);  // of each head, or of all together
    check(norm.ndim() == 1 && (norm.shape(0) == rows || norm.shape(0) == layer.size[i]),
          "a weight of another length");
    type_of(norm);
  }
}

void add_behind(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended) {
  const int columns = inputs[0].shape(-1), count = layer.is.network;
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, rest_of(given, 1), columns);
  check(add_one(inputs, layer, HEADS, given, attended) == columns, "rows of another length");
  if (!count) return;
  const mx::array *parts[PARTS][GIVEN];
  layer.network = network_of(given, HEADS + 1, count, false, layer.is.activation, parts);
  add_network(inputs, parts, layer.network, columns);
  check(parts[count - 1][0]->shape(-2) == columns, "rows of another length");
}

void before(const Layer &layer, const Arrays &arrays, size_t &at, const float *x, int64_t count,
            float *const (&outs)[HEADS], float *gates) {
  const toast_layer &is = layer.is;
  const int64_t columns = arrays[0].shape(-1);
  std::unique_ptr<float[]> normed(new float[count * columns]);
  norm(arrays[at++], is.eps[0], x, count, columns, normed.get());
  const size_t norms = at;
  at += is.normed ? 2 : 0;
  const Vectors vectors = {{normed.get(), count, columns, TOAST_F32}, count};
  auto next = [&](int i) { return Part(arrays, at, layer.packing[i], layer.biased[i]); };
  const Part queries = next(0), keys = next(1), values = next(2);
  std::unique_ptr<float[]> both(gates ? new float[count * queries.matrix->rows] : nullptr);
  multiply(layer.activation_bits, {{vectors, queries, both ? both.get() : outs[0]},
                                   {vectors, keys, outs[1]},
                                   {vectors, values, outs[2]}});
  const int64_t size = layer.size[0], heads = both ? count * is.heads : 0;
  for (int64_t h = 0; h < heads; h++) {
    const float *from = both.get() + h * 2 * size;
    std::copy_n(from, size, outs[0] + h * size);
    std::copy_n(from + size, size, gates + h * size);
  }
  for (int i = 0; is.normed && i < 2; i++) {
    const int64_t rows = (i ? is.key_heads : is.heads) * layer.size[i];
    const int64_t length = arrays[norms + i].shape(0);
    norm(arrays[norms + i], is.eps[2 + i], outs[i], count * rows / length, length, outs[i]);
  }
}

void add_vectors(float *x, const float *y, int64_t count, int64_t columns) {
  std::vector<uint32_t> each(count);
  std::iota(each.begin(), each.end(), 0);
  need(toast_add_rows(x, count, columns, y, count, each.data()));
}

void behind(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
            const float *attended, int64_t count, float *sum, float *out) {
  const int64_t columns = arrays[0].shape(-1);
  const mx::array &weight = arrays[at++];
  const Part part(arrays, at, layer.packing[HEADS], layer.biased[HEADS]);
  const Vectors vectors = {{attended, count, part.matrix->columns, TOAST_F32}, count};
  multiply(layer.activation_bits, {{vectors, part, sum}});
  add_vectors(sum, x, count, columns);
  norm(weight, layer.is.eps[1], sum, count, columns, out);
  if (!layer.network.count) return;
  const Vectors inner = {{out, count, columns, TOAST_F32}, count};
  feed(layer.network, arrays, at, inner, out, TOAST_F32);
  add_vectors(out, sum, count, columns);
}

namespace {

// Queries, keys and values of x (B, L, columns): (B, heads, L, size).
Arrays projected(const mx::array &x, Layer layer, const toast_operands &given) {
  check_rows(x);
  check(!layer.is.gated, "gates, which only a whole layer has");
  Arrays inputs = {x};
  add_before(inputs, layer, given);
  std::vector<mx::Shape> shapes;
  for (int i = 0; i < HEADS; i++)
    shapes.push_back({x.shape(0), i ? layer.is.key_heads : layer.is.heads, x.shape(1),
                      layer.size[i]});
  const Weights weights = {1, inputs.size()};
  return made("ToastProjected", std::move(shapes), std::vector<mx::Dtype>(HEADS, mx::float32),
              std::move(inputs), [layer](const Arrays &arrays) {
    InOrder rows(arrays[0]);
    float *outs[HEADS];
    for (int i = 0; i < HEADS; i++) {
      mx::array out = arrays[arrays.size() - HEADS + i];
      outs[i] = out.data<float>();
    }
    size_t at = 1;
    before(layer, arrays, at, reinterpret_cast<const float *>(rows.data()),
           int64_t(arrays[0].size()) / arrays[0].shape(-1), outs);
  }, lie_by_position, weights);
}

// Heads (B, heads, L, size) as vectors (B * L, heads * size): where they lie so, or else a copy.
class Joined {
 public:
  explicit Joined(const mx::array &a) : data_(a.data<float>()) {
    const int64_t heads = a.shape(1), positions = a.shape(2), size = a.shape(3);
    const bool batches = a.shape(0) == 1 || a.strides(0) == positions * heads * size;
    const bool rows = positions == 1 || a.strides(2) == heads * size;
    if (batches && rows && (heads == 1 || a.strides(1) == size) &&
        (size == 1 || a.strides(3) == 1))
      return;
    copy_.reset(new float[a.size()]);
    float *to = copy_.get();
    for (int64_t b = 0; b < a.shape(0); b++)
      for (int64_t l = 0; l < positions; l++)
        for (int64_t h = 0; h < heads; h++)
          for (int64_t k = 0; k < size; k++)
            *to++ = data_[b * a.strides(0) + h * a.strides(1) + l * a.strides(2) +
                          k * a.strides(3)];
    data_ = copy_.get();
  }
  const float *data() const { return data_; }

 private:
  const float *data_;
  std::unique_ptr<float[]> copy_;
};

// What a layer makes of x (B, L, columns) and of what its attention gave, (B, heads, L, size):
// x + out(attended) + what its network makes of that; or without a network that sum, and its norm.
Arrays closed(const mx::array &x, const mx::array &attended, Layer layer,
              const toast_operands &given) {
  check_rows(x);
  check(attended.ndim() == 4 && attended.dtype() == mx::float32 &&
            attended.shape(0) == x.shape(0) && attended.shape(2) == x.shape(1),
        "heads of another shape");
  Arrays inputs = {x};
  add_behind(inputs, layer, given, int64_t(attended.shape(1)) * attended.shape(3));
  const Weights weights = {1, inputs.size()};
  inputs.push_back(attended);
  const size_t outputs = layer.is.network ? 1 : 2;
  return made("ToastClosed", std::vector<mx::Shape>(outputs, x.shape()),
              std::vector<mx::Dtype>(outputs, mx::float32), std::move(inputs),
              [layer, outputs](const Arrays &arrays) {
    const int64_t columns = arrays[0].shape(-1), count = int64_t(arrays[0].size()) / columns;
    InOrder rows(arrays[0]);
    const Joined heads(arrays[arrays.size() - outputs - 1]);
    mx::array out = arrays.back(), first = arrays[arrays.size() - outputs];
    std::unique_ptr<float[]> own(outputs == 1 ? new float[count * columns] : nullptr);
    size_t at = 1;
    behind(layer, arrays, at, reinterpret_cast<const float *>(rows.data()), heads.data(), count,
           own ? own.get() : first.data<float>(), out.data<float>());
  }, -1, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Make `outs`, arrays that nobody else has, what lies before attention: queries, keys, values; or
// what lies behind it: one, or two where there is no network. Lazy. Return what is wrong; NULL
// where nothing is.
TOAST_API const char *toast_projected_array(void **outs, void *x, const toast_operands *given,
                                            const toast_layer *layer) {
  using toast::array_of;
  return toast::wrong([&] {
    auto made = toast::projected(array_of(x), {*layer}, *given);
    for (int i = 0; i < toast::HEADS; i++) array_of(outs[i]) = made[i];
  });
}

TOAST_API const char *toast_closed_array(void **outs, void *x, void *attended,
                                         const toast_operands *given, const toast_layer *layer) {
  using toast::array_of;
  return toast::wrong([&] {
    auto made = toast::closed(array_of(x), array_of(attended), {*layer}, *given);
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
