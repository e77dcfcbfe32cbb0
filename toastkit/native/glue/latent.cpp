// Latent attention: what lies before it and behind it, and what a single position attends to.
#include "latent.h"

#include "../kernels/sharing.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace toast {
namespace {

std::unique_ptr<float[]> some(int64_t numbers) {
  return std::unique_ptr<float[]>(new float[numbers]);
}

int turned_size(const Layer &layer) {
  return layer.is.opened ? layer.size[0] - layer.is.still : layer.size[2];
}

// A matrix for each head times its own vectors, (count, heads, columns) with so many numbers from
// one to the next: (count, heads, rows).
void multiply_heads(const Layer &layer, const Part &stack, const float *x, int64_t count,
                    int64_t stride, float *out) {
  const int64_t all = count * layer.is.heads;
  std::unique_ptr<uint32_t[]> head(new uint32_t[all]);
  for (int64_t i = 0; i < all; i++) head[i] = uint32_t(i % layer.is.heads);
  const Vectors vectors = {{x, all, stride, TOAST_F32}, all, nullptr, head.get()};
  multiply(layer.activation_bits, {{vectors, stack, out}});
}

// Queries, (count, heads, still and turned), and what keys and values come of, (count, latent and
// turned), the first of which is normed into `latent`.
struct Made {
  std::unique_ptr<float[]> queries, both, latent;
};

Made make(const Layer &layer, const Arrays &arrays, size_t &at, const float *x, int64_t count) {
  const toast_layer &is = layer.is;
  const int64_t columns = arrays[0].shape(-1);
  const auto normed = some(layer.has[FIRST_NORM] ? count * columns : 0);
  if (layer.has[FIRST_NORM])
    apply_norm(layer, FIRST_NORM, arrays, at, x, count * columns, normed.get());
  std::optional<Part> first;
  if (is.narrow) first.emplace(arrays, at, layer.packing[NARROW], layer.biased[NARROW]);
  size_t query_norm = at;
  at += layer.has[QUERY_NORM];
  const Part queries(arrays, at, layer.packing[0], layer.biased[0]);
  const Part keys(arrays, at, layer.packing[1], layer.biased[1]);
  const int64_t row = keys.matrix->rows;
  Made made = {some(count * queries.matrix->rows), some(count * row), some(count * is.latent)};
  const auto inner = some(count * is.narrow);
  float *const narrow = inner.get(), *const both = made.both.get();
  const float *rows = layer.has[FIRST_NORM] ? normed.get() : x;
  const Vectors vectors = {{rows, count, columns, TOAST_F32}, count};
  multiply(layer.activation_bits,
           {{vectors, first ? *first : queries, first ? narrow : made.queries.get()},
            {vectors, keys, both}});
  if (first) {
    if (layer.has[QUERY_NORM])
      apply_norm(layer, QUERY_NORM, arrays, query_norm, narrow, count * is.narrow, narrow);
    const Vectors fewer = {{narrow, count, is.narrow, TOAST_F32}, count};
    multiply(layer.activation_bits, {{fewer, queries, made.queries.get()}});
  }
  apply_norm(layer, KEY_NORM, arrays, at, both, count * is.latent, made.latent.get(), row);
  return made;
}

// Heads (count, heads, head), of which the last numbers are turned: these, (batch, heads, length,
// turned).
void turn(const float *x, int64_t heads, int64_t head, int64_t turned, const Turning &turning,
          const toast_rotation &rotation, float *out) {
  const toast_heads last = {
      x + head - turned, turning.batch, heads, turning.length, turned,
      {turning.length * heads * head, head, heads * head}, TOAST_F32,
  };
  need(toast_rotate(&last, &rotation, out));
}

}  // namespace

void add_latent(Arrays &inputs, Layer &layer, const toast_operands &given) {
  const toast_layer &is = layer.is;
  const int64_t columns = inputs[0].shape(-1);
  const int heads = is.heads, behind = OUT + 1 + is.network;
  check(!is.gated && !is.late && !is.joined && !is.shares && !is.own && !given.rest[VALUE_NORM] &&
            !given.rest[SINKS],
        "latent attention with what it has not");
  check(heads > 0 && is.key_heads == (is.opened ? heads : 1) && is.latent > 0 && is.still > 0 &&
            given.rest[KEY_NORM],
        "heads of other sizes");
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  check(is.narrow >= 0 && (is.narrow || !given.rest[QUERY_NORM]), "a norm of queries");
  if (is.narrow)
    check(add_one(inputs, layer, NARROW, given, behind, columns) == is.narrow,
          "rows of another length");
  add_norm(inputs, layer, QUERY_NORM, given, is.narrow, is.narrow);
  const int all = add_one(inputs, layer, 0, given, 0, is.narrow ? is.narrow : columns);
  const int turned = all / heads - is.still;
  check(all % heads == 0 && turned > 0 &&
            add_one(inputs, layer, 1, given, 1, columns) == is.latent + turned,
        "heads of other sizes");
  add_norm(inputs, layer, KEY_NORM, given, is.latent, is.latent);
  if (is.opened) {
    const int both = add_one(inputs, layer, 2, given, 2, is.latent);
    check(both % heads == 0 && both / heads > is.still, "values of another size");
    layer.size[0] = layer.size[1] = is.still + turned, layer.size[2] = both / heads - is.still;
  } else {
    check(add_one(inputs, layer, 2, given, 2, is.still, heads) == is.latent,
          "queries that do not go to the latent");
    layer.size[0] = is.latent + turned, layer.size[1] = is.latent, layer.size[2] = turned;
  }
  add_rotation(inputs, layer, given, turned);
}

void latent_before(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                   const Turning &turning, float *const (&outs)[HEADS]) {
  const toast_layer &is = layer.is;
  const int64_t length = turning.length, count = turning.batch * length, heads = is.heads;
  const int64_t turned = turned_size(layer), head = is.still + turned, wide = layer.size[0];
  const Made made = make(layer, arrays, at, x, count);
  const Part values(arrays, at, layer.packing[2], layer.biased[2]);
  InOrder frequencies(arrays[at++]);
  const auto rotation =
      rotation_of(is, frequencies.floats(), turning.positions, turning.rows);
  const auto turned_queries = some(count * heads * turned), turned_keys = some(count * turned);
  turn(made.queries.get(), heads, head, turned, turning, rotation, turned_queries.get());
  turn(made.both.get(), 1, is.latent + turned, turned, turning, rotation, turned_keys.get());
  const int64_t first = wide - turned;  // what comes before what is turned
  const int64_t row = is.opened ? values.matrix->rows / heads : is.latent;
  const auto more = some(count * heads * row);
  if (is.opened) {
    const Vectors latent = {{made.latent.get(), count, is.latent, TOAST_F32}, count};
    multiply(layer.activation_bits, {{latent, values, more.get()}});
  } else {
    multiply_heads(layer, values, made.queries.get(), count, head, more.get());
    std::copy_n(made.latent.get(), count * is.latent, outs[1]);
    std::copy_n(turned_keys.get(), count * turned, outs[2]);
  }
  share(count, heads * (wide + row), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * heads; i < end * heads; i++) {
      const int64_t position = i / heads, batch = position / length;
      const float *from = is.opened ? made.queries.get() + i * head : more.get() + i * row;
      const int64_t place = (batch * heads + i % heads) * length + position % length;
      float *to = std::copy_n(from, first, outs[0] + i * wide);
      std::copy_n(turned_queries.get() + place * turned, turned, to);
      if (!is.opened) continue;
      from = more.get() + i * row;
      to = std::copy_n(from, is.still, outs[1] + i * head);
      std::copy_n(turned_keys.get() + position * turned, turned, to);
      std::copy_n(from + is.still, row - is.still, outs[2] + i * (row - is.still));
    }
  });
}

int attended_size(const Layer &layer) {
  return layer.is.latent && !layer.is.opened ? layer.is.latent : layer.size[2];
}

namespace {

// Rows of a cache of one head, of a batch: where they lie side by side, or else a copy; those in
// bytes as floats.
class KeptRows {
 public:
  KeptRows(const mx::array &cache, int64_t batch, int64_t length) {
    const int64_t row = cache.shape(3) * cache.itemsize();
    const int64_t step = cache.strides(2) * cache.itemsize();
    rows_ = cache.data<char>() + batch * cache.strides(0) * cache.itemsize();
    if (step != row) {
      copy_.reset(new char[length * row]);
      for (int64_t i = 0; i < length; i++) memcpy(copy_.get() + i * row, rows_ + i * step, row);
      rows_ = copy_.get();
    }
    if ((type = kept_type(cache)) != TOAST_I8) return;
    const int64_t columns = row_size(cache);
    wide_ = some(length * columns);
    need(toast_dequantise(rows_, length, columns, wide_.get()));
    rows_ = reinterpret_cast<const char *>(wide_.get()), type = TOAST_F32;
  }
  const void *data() const { return rows_; }
  int type;

 private:
  const char *rows_;
  std::unique_ptr<char[]> copy_;
  std::unique_ptr<float[]> wide_;
};

}  // namespace

void attend_to_latent(const Layer &layer, float *queries, int64_t batch, const mx::array &latent,
                   const mx::array &keys, int64_t length, float *attended) {
  const toast_layer &is = layer.is;
  const int64_t heads = is.heads, turned = layer.size[2], wide = layer.size[0];
  const auto scores = some(batch * heads * length);
  for (int64_t i = 0; i < batch * heads; i++)
    for (int64_t k = is.latent; k < wide; k++) queries[i * wide + k] *= is.scale;
  for (int64_t b = 0; b < batch; b++) {
    const KeptRows rows(keys, b, length);
    const toast_matrix matrix = {rows.data(), nullptr, nullptr, 1, length, turned, 0, 0, rows.type};
    const toast_vectors last = {queries + b * heads * wide + is.latent, heads, wide, TOAST_F32};
    need(toast_multiply(&matrix, &last, heads, nullptr, nullptr, layer.activation_bits,
                        scores.get() + b * heads * length, TOAST_F32));
  }
  const toast_rows kept = {latent.data<char>(),
                           {latent.strides(0), latent.strides(1), latent.strides(2)},
                           kept_type(latent)};
  const toast_attention call = {
      {queries, {heads * wide, wide, heads * wide}, TOAST_F32}, kept, kept, batch, heads, 1, 1,
      length, is.latent, is.latent, is.scale, TOAST_ADDED, scores.get(),
      {heads * length, length, heads * length}, TOAST_F32, nullptr, 0,
  };
  const int64_t strides[3] = {heads * is.latent, is.latent, heads * is.latent};
  need(toast_attend(&call, attended, strides, TOAST_F32));
}

void add_values(Arrays &inputs, Layer &layer, const toast_operands &given) {
  if (!layer.is.latent || layer.is.opened) return;
  const int place = OUT + 1 + layer.is.network + (layer.is.narrow ? 1 : 0);
  layer.value = add_one(inputs, layer, UNEMBED, given, place, layer.is.latent, layer.is.heads);
}

const float *values_of(const Layer &layer, const Arrays &arrays, size_t &at, const float *attended,
                       int64_t count, std::unique_ptr<float[]> &values) {
  if (!layer.value) return attended;
  const Part stack(arrays, at, layer.packing[UNEMBED], layer.biased[UNEMBED]);
  values = some(count * layer.is.heads * layer.value);
  multiply_heads(layer, stack, attended, count, layer.is.latent, values.get());
  return values.get();
}

namespace {

// What lies before attention, of x (B, L, columns): (B, heads, L, size) each. positions: of the
// first, int32 (B,); NULL for `position`.
Arrays latent_projected(const mx::array &x, const mx::array *positions, int32_t position,
                        Layer layer, const toast_operands &given) {
  check_rows(x);
  Arrays inputs = {x};
  add_latent(inputs, layer, given);
  const Weights weights = {1, inputs.size()};
  if (positions) {
    check(positions->dtype() == mx::int32 && positions->shape() == mx::Shape{x.shape(0)},
          "positions of another batch");
    inputs.push_back(*positions);
  }
  std::vector<mx::Shape> shapes;
  for (int i = 0; i < HEADS; i++)
    shapes.push_back({x.shape(0), i ? layer.is.key_heads : layer.is.heads, x.shape(1),
                      layer.size[i]});
  return made("ToastLatent", std::move(shapes), std::vector<mx::Dtype>(HEADS, mx::float32),
              std::move(inputs),
              [layer, position, given = positions != nullptr](const Arrays &arrays) {
    InOrder rows(arrays[0]);
    std::optional<InOrder> offsets;
    if (given) offsets.emplace(arrays.end()[-1 - HEADS]);
    float *outs[HEADS];
    for (int i = 0; i < HEADS; i++) {
      mx::array out = arrays.end()[i - HEADS];
      outs[i] = out.data<float>();
    }
    const int64_t batch = arrays[0].shape(0);
    const Turning turning = {
        batch, arrays[0].shape(1),
        given ? reinterpret_cast<const int32_t *>(offsets->data()) : &position, given ? batch : 1};
    size_t at = 1;
    latent_before(layer, arrays, at, rows.floats(), turning, outs);
  }, lie_by_position, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `outs`, arrays that nobody else has, queries, keys and values of latent attention, turned.
// positions: NULL for `position` in each row of the batch. Lazy. Returns what is wrong; NULL where
// nothing is.
TOAST_API const char *toast_latent_array(void **outs, void *x, void *positions, int position,
                                         const toast_operands *given, const toast_layer *layer) {
  using toast::array_if, toast::array_of;
  return toast::wrong([&] {
    auto made = toast::latent_projected(array_of(x), array_if(positions), position, {*layer},
                                        *given);
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
