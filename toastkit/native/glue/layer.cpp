// A layer of the common form as one MLX primitive, with the caches that it appends to.
#include <optional>

#include "caches.h"
#include "latent.h"
#include "mixture.h"

namespace toast {
namespace {

// Heads (batch, heads, length, size), which lie head by head; or position by position.
toast_heads heads_of(const float *data, int64_t batch, int64_t heads, int64_t length, int64_t size,
                     bool by_position) {
  const int64_t all = heads * length * size;
  if (by_position) return {data, batch, heads, length, size, {all, size, heads * size}, TOAST_F32};
  return {data, batch, heads, length, size, {all, length * size, size}, TOAST_F32};
}

toast_rows rows_of(const mx::array &cache) {
  return {cache.data<char>(), {cache.strides(0), cache.strides(1), cache.strides(2)},
          kept_type(cache)};
}

// A layer, and the mixture that is its network, unless that has no experts. outputs: one, or, where
// it has neither network nor mixture, the sum and its norm.
struct Whole {
  Layer layer;
  Mixture mixture;
  size_t outputs;
  bool sinks, scaled, summed;
};

// Where new positions go in the caches, or are in those of another layer, how many are attended to
// then, and which they are.
struct Place {
  int first, length;
  int32_t position;
  bool causal;
};

// What a layer attends with, and to what: x (batch, length, columns), caches as they were and as
// they become, and factors of queries; NULL for none.
struct Attending {
  const float *x;
  int64_t batch, length;
  const Place &place;
  const mx::array &keys_before, &values_before;
  mx::array keys, values;
  const float *scales;

  int64_t count() const { return batch * length; }
  // Queries (batch, heads, length, size), or with heads behind length, times their factors.
  void scale(float *queries, int64_t numbers, int64_t row) const {
    for (int64_t i = 0; scales && i < numbers; i++) queries[i] *= scales[i / row % length];
  }
};

// Of queries and keys that are turned when they have been made: (count, heads, value). at: as
// `before` has it.
void attend(const Whole &whole, const Arrays &arrays, size_t &at, const Attending &a,
            float *attended) {
  const Layer &layer = whole.layer;
  const toast_layer &is = layer.is;
  const int64_t batch = a.batch, length = a.length, count = a.count();
  const int64_t query = layer.size[0], value = layer.size[2];
  const int64_t wide = count * is.heads * query, narrow = count * is.key_heads * query;
  const int64_t kept = count * is.key_heads * value;
  std::unique_ptr<float[]> memory(new float[3 * wide + 2 * narrow + kept]);
  float *const q = memory.get(), *const k = q + wide, *const v = k + narrow;
  float *const turned_q = v + kept, *const turned_k = turned_q + wide;
  float *const gates = turned_k + narrow;
  before(layer, arrays, at, a.x, count, {q, k, v}, is.gated ? gates : nullptr);

  size_t norms = at;
  if (is.late) at += layer.has[QUERY_NORM] + layer.has[KEY_NORM] + layer.has[VALUE_NORM];
  InOrder frequencies(arrays[at++]);
  const auto rotation = rotation_of(is, frequencies.floats(), &a.place.position, 1);
  const auto queries = heads_of(q, batch, is.heads, length, query, true);
  const auto new_keys = heads_of(k, batch, is.key_heads, length, query, true);
  need(toast_rotate(&queries, &rotation, turned_q));
  if (!is.shares) need(toast_rotate(&new_keys, &rotation, turned_k));
  if (is.late) norm_heads(layer, arrays, norms, count, {turned_q, turned_k, v});
  a.scale(turned_q, wide, query);
  mx::array keys = a.keys, values = a.values;
  if (!is.shares) {
    const auto turned_keys = heads_of(turned_k, batch, is.key_heads, length, query, false);
    const auto new_values = heads_of(v, batch, is.key_heads, length, value, true);
    write_heads(a.keys_before, keys, turned_keys, a.place.first);
    write_heads(a.values_before, values, new_values, a.place.first);
  }

  std::unique_ptr<InOrder> sinks(whole.sinks ? new InOrder(arrays[at++]) : nullptr);
  const toast_attention call = {
      {turned_q, {is.heads * length * query, length * query, query}, TOAST_F32},
      rows_of(keys), rows_of(values), batch, is.heads, is.key_heads, length, a.place.length, query,
      value, is.scale, a.place.causal ? TOAST_CAUSAL : TOAST_ALL, nullptr, {}, 0,
      sinks ? sinks->floats() : nullptr, is.cap,
  };
  const int64_t strides[3] = {length * is.heads * value, value, is.heads * value};
  need(toast_attend(&call, attended, strides, TOAST_F32));
  const int64_t joined = count * is.heads * value;
  if (is.gated) need(toast_gate(gates, attended, joined, TOAST_F32, TOAST_SIGMOID, attended));
}

// The same of latent attention.
void attend_latent(const Layer &layer, const Arrays &arrays, size_t &at, const Attending &a,
                   float *attended) {
  const toast_layer &is = layer.is;
  const int64_t batch = a.batch, length = a.length, count = a.count();
  const int64_t query = layer.size[0], key = layer.size[1], value = layer.size[2];
  const int64_t wide = count * is.heads * query, narrow = count * is.key_heads * key;
  std::unique_ptr<float[]> memory(new float[wide + narrow + count * is.key_heads * value]);
  float *const q = memory.get(), *const k = q + wide, *const v = k + narrow;
  latent_before(layer, arrays, at, a.x, {batch, length, &a.place.position, 1}, {q, k, v});
  a.scale(q, wide, is.heads * query);
  mx::array keys = a.keys, values = a.values;
  const auto new_keys = heads_of(k, batch, is.key_heads, length, key, true);
  const auto new_values = heads_of(v, batch, is.key_heads, length, value, true);
  write_heads(a.keys_before, keys, new_keys, a.place.first);
  write_heads(a.values_before, values, new_values, a.place.first);
  if (!is.opened) return attend_to_latent(layer, q, batch, keys, values, a.place.length, attended);
  const toast_attention call = {
      {q, {length * is.heads * query, query, is.heads * query}, TOAST_F32},
      rows_of(keys), rows_of(values), batch, is.heads, is.key_heads, length, a.place.length, query,
      value, is.scale, a.place.causal ? TOAST_CAUSAL : TOAST_ALL, nullptr, {}, 0, nullptr, 0,
  };
  const int64_t strides[3] = {length * is.heads * value, value, is.heads * value};
  need(toast_attend(&call, attended, strides, TOAST_F32));
}

// arrays: x, those of what lies before, frequencies, sinks, those of what lies behind, those of a
// mixture, factors of queries, its own input, a sum in place of x, both caches; and what comes out
// of it, and, unless these are another layer's, both caches again.
void compute(const Whole &whole, const Arrays &arrays, const Place &place) {
  const Layer &layer = whole.layer;
  const toast_layer &is = layer.is;
  const mx::array &x = arrays[0];
  const int64_t columns = x.shape(2), count = x.shape(0) * x.shape(1);
  const size_t all = arrays.size(), outs = whole.outputs + (is.shares ? 0 : 2);
  const size_t caches = all - outs - 2, kept_in = is.shares ? caches : all - 2;
  const Written keys_written(arrays[kept_in]), values_written(arrays[kept_in + 1]);
  mx::array first_out = arrays[all - outs], out = arrays[all - outs + whole.outputs - 1];
  InOrder in_order(x);
  std::optional<InOrder> total, own, scales;  // which lie before the caches, in the other order
  size_t beside = caches;
  if (whole.summed) total.emplace(arrays[--beside]);
  if (is.own) own.emplace(arrays[--beside]);
  if (whole.scaled) scales.emplace(arrays[--beside]);

  const Attending attending = {
      in_order.floats(), x.shape(0), x.shape(1), place, arrays[caches], arrays[caches + 1],
      arrays[kept_in], arrays[kept_in + 1], scales ? scales->floats() : nullptr,
  };
  const int64_t joined = count * is.heads * attended_size(layer);
  std::unique_ptr<float[]> memory(new float[joined + count * columns]), made;
  float *const attended = memory.get();
  size_t at = 1;
  if (is.latent) {
    attend_latent(layer, arrays, at, attending, attended);
  } else {
    attend(whole, arrays, at, attending, attended);
  }
  const float *values = values_of(layer, arrays, at, attended, count, made);
  float *const to = out.data<float>();
  float *const sum = whole.outputs == 2 ? first_out.data<float>()
                     : is_all(layer)    ? to
                                        : attended + joined;
  behind(layer, arrays, at, total ? total->floats() : in_order.floats(), values, count, sum, to,
         own ? own->floats() : nullptr);
  if (whole.mixture.choice.chosen)
    mix_behind(layer, whole.mixture, arrays, at, sum, count, to);
}

// What comes out of it, one or two, and both caches with the new positions.
Arrays layer_of(const mx::array &x, const mx::array &keys, const mx::array &values,
                const mx::array *scales, const mx::array *own, const mx::array *sum,
                const Place &place, const toast_layer &is, const toast_operands &given,
                const toast_mixture *mixture) {
  check_rows(x);
  Whole whole = {{is}, {}, 1, false, scales != nullptr, sum != nullptr};
  Layer &layer = whole.layer;
  Arrays inputs = {x};
  if (is.latent) {
    add_latent(inputs, layer, given);
    check(is.opened || x.shape(1) == 1, "several positions, of which none sees what follows");
  } else {
    add_before(inputs, layer, given);
    check(layer.size[0] == layer.size[1] && is.heads % is.key_heads == 0, "heads of other sizes");
    check(!is.gated || layer.size[0] == layer.size[2], "gates of another size than values");
    add_rotation(inputs, layer, given, layer.size[0]);
    if ((whole.sinks = given.rest[SINKS])) {
      const mx::array &sinks = rest_of(given, SINKS);
      check(sinks.dtype() == mx::float32 && sinks.shape() == mx::Shape{is.heads},
            "sinks of other heads");
      inputs.push_back(sinks);
    }
  }
  add_values(inputs, layer, given);
  add_behind(inputs, layer, given, int64_t(is.heads) * (layer.value ? layer.value : layer.size[2]));
  if (mixture) {
    whole.mixture = add_mixture_behind(inputs, layer, given, *mixture);
  } else if (!is.network && !is_all(layer)) {
    whole.outputs = 2;
  }
  mx::Shape shape = {x.shape(0), is.key_heads, x.shape(1), layer.size[1]};
  check_cache(keys, shape, place.first);
  shape[3] = layer.size[2];
  check_cache(values, shape, place.first);
  check(place.length >= place.first + x.shape(1) && place.length <= keys.shape(2) &&
            place.length <= values.shape(2) && place.position >= 0 &&
            (!place.causal || place.length == place.first + x.shape(1)),
        "other positions");
  const Weights weights = {1, inputs.size()};
  if (scales) {
    check(scales->dtype() == mx::float32 && scales->shape() == mx::Shape{x.shape(1), 1},
          "factors of other positions");
    inputs.push_back(*scales);
  }
  add_own(inputs, layer, own);
  if (sum) {
    check(sum->shape() == x.shape() && sum->dtype() == mx::float32, "a sum of another shape");
    inputs.push_back(*sum);
  }
  inputs.push_back(keys), inputs.push_back(values);
  std::vector<mx::Shape> shapes(whole.outputs, x.shape());
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  for (auto cache : {&keys, &values})
    if (!is.shares) shapes.push_back(cache->shape()), dtypes.push_back(cache->dtype());
  return made("ToastLayer", std::move(shapes), dtypes, std::move(inputs),
              [=](const Arrays &arrays) { compute(whole, arrays, place); },
              [sums = whole.outputs, all = is_all(layer)](const Arrays &inputs, Arrays &outputs) {
    if (all) {  // it is written to before x is added
      outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    } else {
      lie_in_place(inputs[0], outputs[sums - 1]);
    }
    if (sums > 1) outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    for (size_t i = 0; i < 2; i++) {
      const mx::array &cache = inputs.end()[int(i) - 2];
      outputs.size() > sums ? lie_as_before(cache, outputs[sums + i]) : line_up(cache);
    }
  }, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `outs`, arrays that nobody else has, what a layer gives of x, one, or two where there is no
// network, and its caches of keys and values with the new positions from `first` on, of which so
// many are attended to; one that shares those of another, which have them, gives none. Lazy.
// scales: float32 (positions, 1), by which queries are multiplied once they are rotated; NULL for
// none. own: its own input; NULL for none. sum: what attention's is added to, in place of x; NULL
// for x. position: of the first, as it is rotated. mixture: which is its network; NULL for none.
// Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_whole_array(void **outs, void *x, void *keys, void *values,
                                        void *scales, void *own, void *sum, int first,
                                        int length, int position, int causal,
                                        const toast_operands *given,
                                        const toast_layer *layer, const toast_mixture *mixture) {
  using toast::array_if, toast::array_of;
  return toast::wrong([&] {
    auto made = toast::layer_of(array_of(x), array_of(keys), array_of(values),
                                array_if(scales), array_if(own), array_if(sum),
                                {first, length, position, causal != 0}, *layer, *given, mixture);
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
