// What lies in a layer before its attention and behind it, as MLX primitives: the kernels of norms,
// products and gates one after another, to the bit what these give in float32 as operations.
#include "blocks.h"

#include <algorithm>
#include <numeric>

#include "../kernels/rows.h"

namespace toast {
namespace {

// A part for vectors of so many columns. there: which arrays it has besides its weight.
void take_part(Objects &objects, int there, const mx::array *(&part)[GIVEN]) {
  for (int i = 0; i < GIVEN; i++) part[i] = !i || there >> (i - 1) & 1 ? &objects.take() : nullptr;
}

// What its arrays say of a part for vectors of so many columns.
Packing packing_of(const mx::array *const (&part)[GIVEN], int64_t columns) {
  const mx::array *scales = part[1];
  if (!scales) return {0, 0, false, nullptr};
  const int64_t groups = scales->ndim() ? scales->shape(-1) : 0;
  check(part[0]->ndim() == 2 && groups > 0 && columns > 0, "a matrix of another shape");
  const int64_t bits = part[0]->shape(-1) * int64_t(32) / columns, size = columns / groups;
  check((bits == 2 || bits == 3 || bits == 4 || bits == 6 || bits == 8) &&
            (size == 32 || size == 64 || size == 128),
        "a packing that the kernels have not");
  return {int(bits), int(size), false, part[2]};
}

void add_norm(Arrays &inputs, const mx::array &weight, int64_t length) {
  check(weight.shape() == mx::Shape{int(length)}, "a weight of another length");
  type_of(weight);
  inputs.push_back(weight);
}

// One of the parts before attention and the one behind it; its rows.
int add_one(Arrays &inputs, Layer &layer, int i, Objects &objects, int64_t columns) {
  const mx::array *part[GIVEN];
  take_part(objects, layer.is.parts[i], part);
  layer.packing[i] = packing_of(part, columns);
  layer.biased[i] = part[GIVEN - 1];
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

void add_before(Arrays &inputs, Layer &layer, Objects &objects) {
  const int64_t columns = inputs[0].shape(-1);
  const int heads[HEADS] = {layer.is.heads, layer.is.key_heads, layer.is.key_heads};
  add_norm(inputs, objects.take(), columns);
  const mx::array *norms[2];
  for (int i = 0; layer.is.normed && i < 2; i++) inputs.push_back(*(norms[i] = &objects.take()));
  for (int i = 0; i < HEADS; i++) {
    const int all = add_one(inputs, layer, i, objects, columns);
    const int parts = heads[i] * (!i && layer.is.gated ? 2 : 1);
    check(parts > 0 && all > 0 && all % parts == 0, "heads of other sizes");
    layer.size[i] = all / parts;
    const int rows = layer.size[i] * heads[i];
    if (!layer.is.normed || i == 2) continue;
    const mx::array &norm = *norms[i];  // of each head, or of all together
    check(norm.ndim() == 1 && (norm.shape(0) == rows || norm.shape(0) == layer.size[i]),
          "a weight of another length");
    type_of(norm);
  }
}

void add_behind(Arrays &inputs, Layer &layer, Objects &objects, int64_t attended) {
  const int columns = inputs[0].shape(-1), count = layer.is.network;
  check(count == 0 || count == 2 || count == PARTS, "other parts");
  add_norm(inputs, objects.take(), columns);
  check(add_one(inputs, layer, HEADS, objects, attended) == columns, "rows of another length");
  layer.network = {count, {}, {}, layer.is.activation, layer.is.activation_bits};
  if (!count) return;
  const mx::array *parts[PARTS][GIVEN];
  int64_t hidden = 0;
  for (int i = 0; i < count; i++) {
    take_part(objects, layer.is.parts[HEADS + 1 + i], parts[i]);
    layer.network.parts[i] = packing_of(parts[i], i + 1 < count ? columns : hidden);
    layer.network.biased[i] = parts[i][GIVEN - 1];
    if (!i) hidden = parts[0][0]->shape(-2) / (PARTS + 1 - count);
  }
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
  multiply(is.activation_bits, {{vectors, queries, both ? both.get() : outs[0]},
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
  multiply(layer.is.activation_bits, {{vectors, part, sum}});
  add_vectors(sum, x, count, columns);
  norm(weight, layer.is.eps[1], sum, count, columns, out);
  if (!layer.network.count) return;
  const Vectors inner = {{out, count, columns, TOAST_F32}, count};
  feed(layer.network, arrays, at, inner, out, TOAST_F32);
  add_vectors(out, sum, count, columns);
}

namespace {

// Queries, keys and values of x (B, L, columns): (B, heads, L, size).
Arrays projected(const mx::array &x, Layer layer, Objects objects) {
  check_rows(x);
  check(!layer.is.gated, "gates, which only a whole layer has");
  Arrays inputs = {x};
  add_before(inputs, layer, objects);
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
Arrays closed(const mx::array &x, const mx::array &attended, Layer layer, Objects objects) {
  check_rows(x);
  check(attended.ndim() == 4 && attended.dtype() == mx::float32 &&
            attended.shape(0) == x.shape(0) && attended.shape(2) == x.shape(1),
        "heads of another shape");
  Arrays inputs = {x};
  add_behind(inputs, layer, objects, int64_t(attended.shape(1)) * attended.shape(3));
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
// what lies behind it: one, or two where there is no network. Lazy. objects: of the layer's arrays,
// the weights of its norm, and of the norms of queries and keys, and the parts; and behind, again
// from `layer->before` on, the weight of its norm, and the parts. Return what is wrong; NULL where
// nothing is.
TOAST_API const char *toast_projected_array(void **outs, void *x, void **objects,
                                            const toast_layer *layer) {
  using toast::array_of;
  return toast::wrong([&] {
    auto made = toast::projected(array_of(x), {*layer}, toast::Objects(objects));
    for (int i = 0; i < toast::HEADS; i++) array_of(outs[i]) = made[i];
  });
}

TOAST_API const char *toast_closed_array(void **outs, void *x, void *attended, void **objects,
                                         const toast_layer *layer) {
  using toast::array_of;
  return toast::wrong([&] {
    auto made = toast::closed(array_of(x), array_of(attended), {*layer},
                              toast::Objects(objects + layer->before));
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
