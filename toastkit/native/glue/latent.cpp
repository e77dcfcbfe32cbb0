// Multi-head latent attention: projections before and after it, and attention of a single position.
#include "latent.h"

#include "caches.h"
#include "../kernels/sharing.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace toast {
namespace {

std::unique_ptr<float[]> floats(int64_t numbers) {
  return std::unique_ptr<float[]>(new float[numbers]);
}

int rope_size(const Layer &layer) {
  return layer.is.expanded ? layer.size[0] - layer.is.nope : layer.size[2];
}

// Multiplies the vectors of each head by the head's own matrix: x (count, heads, columns) with
// vectors `stride` floats apart, out (count, heads, rows).
void multiply_heads(const Layer &layer, const Part &stack, const float *x, int64_t count,
                    int64_t stride, float *out) {
  const int64_t all = count * layer.is.heads;
  std::unique_ptr<uint32_t[]> head(new uint32_t[all]);
  for (int64_t i = 0; i < all; i++) head[i] = uint32_t(i % layer.is.heads);
  const Vectors vectors = {{x, all, stride, TOAST_F32}, all, nullptr, head.get()};
  multiply(layer.activation_bits, {{vectors, stack, out}});
}

// Queries (count, heads, nope + rope); latent and RoPE part of keys (count, latent + rope); and the
// normed latent (count, latent).
struct LatentProjections {
  std::unique_ptr<float[]> queries, both, latent;
};

LatentProjections project_latent(const Layer &layer, const Arrays &arrays, size_t &at,
                                 const float *x, int64_t count) {
  const toast_layer &is = layer.is;
  const int64_t columns = arrays[0].shape(-1);
  const auto normed = floats(layer.has[FIRST_NORM] ? count * columns : 0);
  if (layer.has[FIRST_NORM])
    apply_norm(layer, FIRST_NORM, arrays, at, x, count * columns, normed.get());
  std::optional<Part> first;
  if (is.query_rank) first.emplace(arrays, at, layer.packing[QUERY_DOWN]);
  size_t query_norm = at;
  at += layer.has[QUERY_NORM];
  const Part queries(arrays, at, layer.packing[0]);
  const Part keys(arrays, at, layer.packing[1]);
  const int64_t row = keys.matrix.rows;
  LatentProjections made = {floats(count * queries.matrix.rows), floats(count * row),
                            floats(count * is.latent)};
  const auto inner = floats(count * is.query_rank);
  float *const narrow = inner.get(), *const both = made.both.get();
  const float *rows = layer.has[FIRST_NORM] ? normed.get() : x;
  const Vectors vectors = {{rows, count, columns, TOAST_F32}, count};
  multiply(layer.activation_bits,
           {{vectors, first ? *first : queries, first ? narrow : made.queries.get()},
            {vectors, keys, both}});
  if (first) {
    if (layer.has[QUERY_NORM])
      apply_norm(layer, QUERY_NORM, arrays, query_norm, narrow, count * is.query_rank, narrow);
    const Vectors fewer = {{narrow, count, is.query_rank, TOAST_F32}, count};
    multiply(layer.activation_bits, {{fewer, queries, made.queries.get()}});
  }
  apply_norm(layer, KEY_NORM, arrays, at, both, count * is.latent, made.latent.get(), row);
  return made;
}

// Applies RoPE to the last `rope` numbers of heads (count, heads, head): out (batch, heads, length,
// rope).
void rotate_last(const float *x, int64_t heads, int64_t head, int64_t rope,
                 const RopePositions &positions, const toast_rotation &rotation, float *out) {
  const toast_heads last = {
      x + head - rope, positions.batch, heads, positions.length, rope, {positions.length * heads *
      head, head, heads * head}, TOAST_F32,
  };
  need(toast_rotate(&last, &rotation, out));
}

}  // namespace

void add_latent(Arrays &inputs, Layer &layer, const toast_operands &given) {
  const toast_layer &is = layer.is;
  const int64_t columns = inputs[0].shape(-1);
  const int heads = is.heads, behind = OUT + 1 + is.network;
  check(!is.gated && !is.norm_after_rope && !is.fused_head && !is.shares_cache && !is.layer_input &&
            !given.rest[VALUE_NORM] && !given.rest[SINKS],
        "latent attention with what it has not");
  check(heads > 0 && is.key_heads == (is.expanded ? heads : 1) && is.latent > 0 && is.nope > 0 &&
            given.rest[KEY_NORM],
        "heads of other sizes");
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  check(is.query_rank >= 0 && (is.query_rank || !given.rest[QUERY_NORM]), "a norm of queries");
  if (is.query_rank)
    check(add_layer_part(inputs, layer, QUERY_DOWN, given, behind, columns) == is.query_rank,
          "rows of another length");
  add_norm(inputs, layer, QUERY_NORM, given, is.query_rank, is.query_rank);
  const int all =
      add_layer_part(inputs, layer, 0, given, 0, is.query_rank ? is.query_rank : columns);
  const int rope = all / heads - is.nope;
  check(all % heads == 0 && rope > 0 &&
            add_layer_part(inputs, layer, 1, given, 1, columns) == is.latent + rope,
        "heads of other sizes");
  add_norm(inputs, layer, KEY_NORM, given, is.latent, is.latent);
  if (is.expanded) {
    const int both = add_layer_part(inputs, layer, 2, given, 2, is.latent);
    check(both % heads == 0 && both / heads > is.nope, "values of another size");
    layer.size[0] = layer.size[1] = is.nope + rope, layer.size[2] = both / heads - is.nope;
  } else {
    check(add_layer_part(inputs, layer, 2, given, 2, is.nope, heads) == is.latent,
          "queries that do not go to the latent");
    layer.size[0] = is.latent + rope, layer.size[1] = is.latent, layer.size[2] = rope;
  }
  add_rotation(inputs, layer, given, rope);
}

void project_latent_heads(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                          const RopePositions &positions, float *const (&outs)[HEADS]) {
  const toast_layer &is = layer.is;
  const int64_t length = positions.length, count = positions.batch * length, heads = is.heads;
  const int64_t rope = rope_size(layer), head = is.nope + rope, wide = layer.size[0];
  const LatentProjections made = project_latent(layer, arrays, at, x, count);
  const Part values(arrays, at, layer.packing[2]);
  Contiguous frequencies(arrays[at++]);
  const auto rotation = rotation_of(is, frequencies.floats(), positions.positions, positions.rows);
  const auto rope_queries = floats(count * heads * rope), rope_keys = floats(count * rope);
  rotate_last(made.queries.get(), heads, head, rope, positions, rotation, rope_queries.get());
  rotate_last(made.both.get(), 1, is.latent + rope, rope, positions, rotation, rope_keys.get());
  const int64_t first = wide - rope;  // numbers of a query before its RoPE part
  const int64_t row = is.expanded ? values.matrix.rows / heads : is.latent;
  const auto more = floats(count * heads * row);
  if (is.expanded) {
    const Vectors latent = {{made.latent.get(), count, is.latent, TOAST_F32}, count};
    multiply(layer.activation_bits, {{latent, values, more.get()}});
  } else {
    multiply_heads(layer, values, made.queries.get(), count, head, more.get());
    std::copy_n(made.latent.get(), count * is.latent, outs[1]);
    std::copy_n(rope_keys.get(), count * rope, outs[2]);
  }
  share(count, heads * (wide + row), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * heads; i < end * heads; i++) {
      const int64_t position = i / heads, batch = position / length;
      const float *from = is.expanded ? made.queries.get() + i * head : more.get() + i * row;
      const int64_t place = (batch * heads + i % heads) * length + position % length;
      float *to = std::copy_n(from, first, outs[0] + i * wide);
      std::copy_n(rope_queries.get() + place * rope, rope, to);
      if (!is.expanded) continue;
      from = more.get() + i * row;
      to = std::copy_n(from, is.nope, outs[1] + i * head);
      std::copy_n(rope_keys.get() + position * rope, rope, to);
      std::copy_n(from + is.nope, row - is.nope, outs[2] + i * (row - is.nope));
    }
  });
}

int attended_size(const Layer &layer) {
  return layer.is.latent && !layer.is.expanded ? layer.is.latent : layer.size[2];
}

namespace {

// Contiguous rows of one batch row of a one-head cache: in place or copied; those of an 8-bit cache
// dequantised.
class CacheRows {
 public:
  CacheRows(const mx::array &cache, int64_t batch, int64_t length) {
    const int64_t row = cache.shape(3) * cache.itemsize();
    const int64_t step = cache.strides(2) * cache.itemsize();
    rows_ = cache.data<char>() + batch * cache.strides(0) * cache.itemsize();
    if (step != row) {
      copy_.reset(new char[length * row]);
      for (int64_t i = 0; i < length; i++) memcpy(copy_.get() + i * row, rows_ + i * step, row);
      rows_ = copy_.get();
    }
    if ((type = cache_type(cache)) != TOAST_I8) return;
    const int64_t columns = head_size(cache);
    wide_ = floats(length * columns);
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

void attend_to_latents(const LatentHeads &is, const float *queries,
                       const std::vector<LatentRow> &rows, float *attended) {
  const int64_t wide = is.latent + is.rope, n = int64_t(rows.size());
  const auto last = floats(n * is.heads * is.rope);
  for (int64_t i = 0; i < n * is.heads * is.rope; i++)
    last[i] = queries[i / is.rope * wide + is.latent + i % is.rope] * is.scale;
  std::vector<std::unique_ptr<float[]>> scores;
  std::vector<toast_attention> calls;
  std::vector<void *> outs;
  for (int64_t i = 0; i < n; i++) {
    const auto &[latent, keys, row, length] = rows[i];
    const CacheRows own(*keys, row, length);
    const toast_matrix matrix = {own.data(), nullptr, nullptr, 1, length, is.rope, 0, 0, own.type};
    const toast_vectors x = {last.get() + i * is.heads * is.rope, is.heads, is.rope, TOAST_F32};
    scores.push_back(floats(is.heads * length));
    need(toast_multiply(&matrix, &x, is.heads, nullptr, nullptr, 0, scores[i].get(), TOAST_F32));
    const toast_rows kept = {
        latent->data<char>() + row * latent->strides(0) * int64_t(latent->itemsize()),
        {latent->strides(0), latent->strides(1), latent->strides(2)}, cache_type(*latent)};
    calls.push_back({{queries + i * is.heads * wide, {is.heads * wide, wide, wide}, TOAST_F32},
                     kept, kept, 1, is.heads, 1, 1, length, is.latent, is.latent, is.scale,
                     TOAST_ADDED, scores[i].get(), {is.heads * length, length, length}, TOAST_F32,
                     nullptr, 0});
    outs.push_back(attended + i * is.heads * is.latent);
  }
  const int64_t strides[3] = {is.heads * is.latent, is.latent, is.latent};
  need(toast_attend_all(calls.data(), int32_t(n), outs.data(), strides, TOAST_F32));
}

void add_value_projection(Arrays &inputs, Layer &layer, const toast_operands &given) {
  if (!layer.is.latent || layer.is.expanded) return;
  const int place = OUT + 1 + layer.is.network + (layer.is.query_rank ? 1 : 0);
  layer.value =
      add_layer_part(inputs, layer, UNEMBED, given, place, layer.is.latent, layer.is.heads);
}

const float *project_values(const Layer &layer, const Arrays &arrays, size_t &at,
                            const float *attended, int64_t count,
                            std::unique_ptr<float[]> &values) {
  if (!layer.value) return attended;
  const Part stack(arrays, at, layer.packing[UNEMBED]);
  values = floats(count * layer.is.heads * layer.value);
  multiply_heads(layer, stack, attended, count, layer.is.latent, values.get());
  return values.get();
}

namespace {

// project_latent_heads of x (B, L, columns): (B, heads, L, size) each. positions: of the first
// token of each row, int32 (B,); NULL for `position` in all.
Arrays latent_projected(const mx::array &x, const mx::array *positions, int32_t position,
                        Layer layer, const toast_operands &given) {
  check_hidden_states(x);
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
  return lazy("ToastLatent", std::move(shapes), std::vector<mx::Dtype>(HEADS, mx::float32),
              std::move(inputs),
              [layer, position, given = positions != nullptr](const Arrays &arrays) {
    Contiguous rows(arrays[0]);
    std::optional<Contiguous> offsets;
    if (given) offsets.emplace(arrays.end()[-1 - HEADS]);
    float *outs[HEADS];
    for (int i = 0; i < HEADS; i++) {
      mx::array out = arrays.end()[i - HEADS];
      outs[i] = out.data<float>();
    }
    const int64_t batch = arrays[0].shape(0);
    const RopePositions positions = {
        batch, arrays[0].shape(1),
        given ? reinterpret_cast<const int32_t *>(offsets->data()) : &position, given ? batch : 1};
    size_t at = 1;
    project_latent_heads(layer, arrays, at, rows.floats(), positions, outs);
  }, allocate_by_position, weights);
}

// inputs: queries, then the latent and the RoPE part of keys of each row.
mx::array attention_apart(Arrays inputs, std::vector<int> lengths, float scale) {
  const mx::array &q = inputs[0];
  const int n = int(lengths.size());
  check(q.ndim() == 4 && q.shape(0) == n && n && q.shape(2) == 1 && q.dtype() == mx::float32,
        "not one query a row");
  const auto size_of = [&](size_t i) { return head_size(inputs[i]); };
  for (int i = 0; i < n; i++)
    for (int at = 1 + 2 * i; at < 3 + 2 * i; at++)
      check(inputs[at].ndim() == 4 && inputs[at].shape(0) == 1 && inputs[at].shape(1) == 1 &&
                lengths[i] > 0 && lengths[i] <= inputs[at].shape(2) &&
                size_of(at) == size_of(2 - at % 2),
            "no latent of its own");
  const LatentHeads is = {q.shape(1), size_of(1), size_of(2), scale};
  check(is.latent > 0 && is.rope > 0 && is.latent + is.rope == q.shape(3), "other sizes");
  return lazy("ToastLatentAttention", {n, q.shape(1), 1, int(is.latent)}, mx::float32,
              std::move(inputs), [is, lengths = std::move(lengths)](const Arrays &arrays) {
    Contiguous queries(arrays[0]);
    std::vector<LatentRow> rows;
    for (size_t i = 0; i < lengths.size(); i++)
      rows.push_back({&arrays[1 + 2 * i], &arrays[2 + 2 * i], 0, lengths[i]});
    mx::array out = arrays.back();
    attend_to_latents(is, queries.floats(), rows, out.data<float>());
  }, allocate_reader);
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to queries, keys and values of latent attention, RoPE applied.
// positions: NULL for `position` in each row of the batch. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_latent_array(void **outs, void *x, void *positions, int position,
                                         const toast_operands *given, const toast_layer *layer) {
  return set_arrays(outs, [&] {
    return toast::latent_projected(array_of(x), array_if(positions), position, {*layer}, *given);
  });
}

// Sets `out`, an unshared array, to latent attention of n rows of one query each, not expanded, to
// latents of their own. given: queries (n, heads, 1, latent + RoPE part) float32, then of each row
// in turn the latent and the RoPE part of keys (1, 1, M, size). lengths: of each, the positions
// that it attends to, from the first on. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_attend_latents_array(void *out, void **given, const int *lengths, int n,
                                                 float scale) {
  return set_array(out, [&] {
    return toast::attention_apart(arrays_of(given, 2 * n + 1), {lengths, lengths + n}, scale);
  });
}

}  // extern "C"
