// A decoder layer of the common form as one MLX primitive, the update of its KV cache included.
#include <optional>

#include "caches.h"
#include "latent.h"
#include "mixture.h"

namespace toast {
namespace {

// Heads (batch, heads, length, size) in that memory order, or (batch, length, heads, size).
toast_heads heads_of(const float *data, int64_t batch, int64_t heads, int64_t length, int64_t size,
                     bool by_position) {
  const int64_t all = heads * length * size;
  if (by_position) return {data, batch, heads, length, size, {all, size, heads * size}, TOAST_F32};
  return {data, batch, heads, length, size, {all, length * size, size}, TOAST_F32};
}

toast_rows rows_of(const mx::array &cache) {
  return {cache.data<char>(),
          {cache.strides(0), cache.strides(1), cache.strides(2)},
          cache_type(cache)};
}

struct LayerOp {
  Layer layer;
  Ending ending;
  bool sinks, scaled, summed;
};

// first: position in the caches where the new ones are written, or, with a shared cache, where they
// are; length: positions attended to; position: of the first one for RoPE.
struct CacheSpan {
  int first, length;
  int32_t position;
  bool causal;
};

// x (batch, length, columns), the caches before and after the update, and factors of queries by
// position, or NULL.
struct AttentionCall {
  const float *x;
  int64_t batch, length;
  const CacheSpan &span;
  const mx::array &keys_before, &values_before;
  mx::array keys, values;
  const float *scales;

  int64_t count() const { return batch * length; }
  // Multiplies queries by their factors. row: floats of a position in memory order.
  void scale(float *queries, int64_t numbers, int64_t row) const {
    for (int64_t i = 0; scales && i < numbers; i++) queries[i] *= scales[i / row % length];
  }
};

// Attention over keys and values of each head: (count, heads, value). at: as for project_heads.
void attend(const LayerOp &op, const Arrays &arrays, size_t &at, const AttentionCall &a,
            float *attended) {
  const Layer &layer = op.layer;
  const toast_layer &is = layer.is;
  const int64_t batch = a.batch, length = a.length, count = a.count();
  const int64_t query = layer.size[0], value = layer.size[2];
  const int64_t wide = count * is.heads * query, narrow = count * is.key_heads * query;
  const int64_t kept = count * is.key_heads * value;
  std::unique_ptr<float[]> memory(new float[3 * wide + 2 * narrow + kept]);
  float *const q = memory.get(), *const k = q + wide, *const v = k + narrow;
  float *const turned_q = v + kept, *const turned_k = turned_q + wide;
  float *const gates = turned_k + narrow;
  project_heads(layer, arrays, at, a.x, count, {q, k, v}, is.gated ? gates : nullptr);

  size_t norms = at;
  if (is.norm_after_rope) at += layer.has[QUERY_NORM] + layer.has[KEY_NORM] + layer.has[VALUE_NORM];
  Contiguous frequencies(arrays[at++]);
  const auto rotation = rotation_of(is, frequencies.floats(), &a.span.position, 1);
  const auto queries = heads_of(q, batch, is.heads, length, query, true);
  const auto new_keys = heads_of(k, batch, is.key_heads, length, query, true);
  need(toast_rotate(&queries, &rotation, turned_q));
  if (!is.shares_cache) need(toast_rotate(&new_keys, &rotation, turned_k));
  if (is.norm_after_rope) norm_heads(layer, arrays, norms, count, {turned_q, turned_k, v});
  a.scale(turned_q, wide, query);
  mx::array keys = a.keys, values = a.values;
  if (!is.shares_cache) {
    const auto turned_keys = heads_of(turned_k, batch, is.key_heads, length, query, false);
    const auto new_values = heads_of(v, batch, is.key_heads, length, value, true);
    write_heads(a.keys_before, keys, turned_keys, a.span.first);
    write_heads(a.values_before, values, new_values, a.span.first);
  }

  std::unique_ptr<Contiguous> sinks(op.sinks ? new Contiguous(arrays[at++]) : nullptr);
  const toast_attention call = {
      {turned_q, {is.heads * length * query, length * query, query}, TOAST_F32},
      rows_of(keys), rows_of(values), batch, is.heads, is.key_heads, length, a.span.length, query,
      value, is.scale, a.span.causal ? TOAST_CAUSAL : TOAST_ALL, nullptr, {}, 0,
      sinks ? sinks->floats() : nullptr, is.cap,
  };
  const int64_t strides[3] = {length * is.heads * value, value, is.heads * value};
  need(toast_attend(&call, attended, strides, TOAST_F32));
  const int64_t joined = count * is.heads * value;
  if (is.gated) need(toast_gate(gates, attended, joined, TOAST_F32, TOAST_SIGMOID, attended));
}

// The same for latent attention.
void attend_latent(const Layer &layer, const Arrays &arrays, size_t &at, const AttentionCall &a,
                   float *attended) {
  const toast_layer &is = layer.is;
  const int64_t batch = a.batch, length = a.length, count = a.count();
  const int64_t query = layer.size[0], key = layer.size[1], value = layer.size[2];
  const int64_t wide = count * is.heads * query, narrow = count * is.key_heads * key;
  std::unique_ptr<float[]> memory(new float[wide + narrow + count * is.key_heads * value]);
  float *const q = memory.get(), *const k = q + wide, *const v = k + narrow;
  project_latent_heads(layer, arrays, at, a.x, {batch, length, &a.span.position, 1}, {q, k, v});
  a.scale(q, wide, is.heads * query);
  mx::array keys = a.keys, values = a.values;
  const auto new_keys = heads_of(k, batch, is.key_heads, length, key, true);
  const auto new_values = heads_of(v, batch, is.key_heads, length, value, true);
  write_heads(a.keys_before, keys, new_keys, a.span.first);
  write_heads(a.values_before, values, new_values, a.span.first);
  if (!is.expanded) {
    std::vector<LatentRow> rows;
    for (int64_t b = 0; b < batch; b++) rows.push_back({&keys, &values, b, a.span.length});
    return attend_to_latents({is.heads, is.latent, value, is.scale}, q, rows, attended);
  }
  const toast_attention call = {
      {q, {length * is.heads * query, query, is.heads * query}, TOAST_F32},
      rows_of(keys), rows_of(values), batch, is.heads, is.key_heads, length, a.span.length, query,
      value, is.scale, a.span.causal ? TOAST_CAUSAL : TOAST_ALL, nullptr, {}, 0, nullptr, 0,
  };
  const int64_t strides[3] = {length * is.heads * value, value, is.heads * value};
  need(toast_attend(&call, attended, strides, TOAST_F32));
}

// arrays, in order: x; those of project_heads; RoPE frequencies; sinks; those of finish_layer;
// those of a mixture; factors of queries; per-layer input; residual in place of x; both caches.
// Outputs: those of the layer and, unless the caches are shared, both updated caches.
void compute(const LayerOp &op, const Arrays &arrays, const CacheSpan &span) {
  const Layer &layer = op.layer;
  const toast_layer &is = layer.is;
  const mx::array &x = arrays[0];
  const int64_t count = x.shape(0) * x.shape(1);
  const size_t all = arrays.size(), outs = op.ending.outputs + (is.shares_cache ? 0 : 2);
  const size_t caches = all - outs - 2, kept_in = is.shares_cache ? caches : all - 2;
  Contiguous contiguous(x);
  std::optional<Contiguous> total, own, scales;  // before the caches, in reverse order
  size_t beside = caches;
  if (op.summed) total.emplace(arrays[--beside]);
  if (is.layer_input) own.emplace(arrays[--beside]);
  if (op.scaled) scales.emplace(arrays[--beside]);

  const AttentionCall attention = {
      contiguous.floats(), x.shape(0), x.shape(1), span, arrays[caches], arrays[caches + 1],
      arrays[kept_in], arrays[kept_in + 1], scales ? scales->floats() : nullptr,
  };
  std::unique_ptr<float[]> memory(new float[count * is.heads * attended_size(layer)]), made;
  float *const attended = memory.get();
  size_t at = 1;
  if (is.latent) {
    attend_latent(layer, arrays, at, attention, attended);
  } else {
    attend(op, arrays, at, attention, attended);
  }
  const float *values = project_values(layer, arrays, at, attended, count, made);
  end_layer(layer, op.ending, arrays, at, total ? total->floats() : contiguous.floats(), values,
            count, all - outs, own ? own->floats() : nullptr);
}

// The layer's outputs, one or two, and both updated caches.
Arrays layer_of(const mx::array &x, const mx::array &keys, const mx::array &values,
                const mx::array *scales, const mx::array *own, const mx::array *sum,
                const CacheSpan &span, const toast_layer &is, const toast_operands &given,
                const toast_mixture *mixture) {
  check_hidden_states(x);
  LayerOp op = {{is}, {}, false, scales != nullptr, sum != nullptr};
  Layer &layer = op.layer;
  Arrays inputs = {x};
  if (is.latent) {
    add_latent(inputs, layer, given);
    check(is.expanded || x.shape(1) == 1, "several positions, of which none sees what follows");
  } else {
    add_head_projections(inputs, layer, given);
    check(layer.size[0] == layer.size[1] && is.heads % is.key_heads == 0, "heads of other sizes");
    check(!is.gated || layer.size[0] == layer.size[2], "gates of another size than values");
    add_rotation(inputs, layer, given, layer.size[0]);
    if ((op.sinks = given.rest[SINKS])) {
      const mx::array &sinks = rest_of(given, SINKS);
      check(sinks.dtype() == mx::float32 && sinks.shape() == mx::Shape{is.heads},
            "sinks of other heads");
      inputs.push_back(sinks);
    }
  }
  add_value_projection(inputs, layer, given);
  const int64_t value = layer.value ? layer.value : layer.size[2];
  op.ending = add_ending(inputs, layer, given, is.heads * value, mixture);
  mx::Shape shape = {x.shape(0), is.key_heads, x.shape(1), layer.size[1]};
  check_cache(keys, shape, span.first);
  shape[3] = layer.size[2];
  check_cache(values, shape, span.first);
  check(span.length >= span.first + x.shape(1) && span.length <= keys.shape(2) &&
            span.length <= values.shape(2) && span.position >= 0 &&
            (!span.causal || span.length == span.first + x.shape(1)),
        "other positions");
  const Weights weights = {1, inputs.size()};
  if (scales) {
    check(scales->dtype() == mx::float32 && scales->shape() == mx::Shape{x.shape(1), 1},
          "factors of other positions");
    inputs.push_back(*scales);
  }
  add_layer_input(inputs, layer, own);
  if (sum) {
    check(sum->shape() == x.shape() && sum->dtype() == mx::float32, "a sum of another shape");
    inputs.push_back(*sum);
  }
  inputs.push_back(keys), inputs.push_back(values);
  std::vector<mx::Shape> shapes(op.ending.outputs, x.shape());
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  for (auto cache : {&keys, &values})
    if (!is.shares_cache) shapes.push_back(cache->shape()), dtypes.push_back(cache->dtype());
  return lazy("ToastLayer", std::move(shapes), dtypes, std::move(inputs),
              [=](const Arrays &arrays) {
    compute(op, arrays, span);
  }, [sums = op.ending.outputs, bare = is_attention_only(layer)](const Arrays &inputs,
                                                                 Arrays &outputs) {
    if (bare) {  // out is written before x is read for the last time
      outputs[0].set_data(memory_for(outputs[0]));
    } else {
      reuse_or_allocate(inputs[0], outputs[sums - 1]);
    }
    if (sums > 1) outputs[0].set_data(memory_for(outputs[0]));
    const mx::array *caches = &inputs.end()[-2];
    outputs.size() > sums ? allocate_caches(caches, &outputs[sums]) : register_writer(caches);
  }, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer (one array, two without a network) and its
// KV caches with the new positions from `first` on; no caches if it shares those of another layer.
// length: positions attended to. position: of the first one for RoPE. scales: float32 (positions,
// 1), factors of queries after RoPE; own: per-layer input; sum: residual that the attention output
// is added to in place of x; mixture: the network; each may be NULL. Lazy. Returns an error message
// or NULL.
TOAST_API const char *toast_whole_array(void **outs, void *x, void *keys, void *values,
                                        void *scales, void *own, void *sum, int first,
                                        int length, int position, int causal,
                                        const toast_operands *given,
                                        const toast_layer *layer, const toast_mixture *mixture) {
  return set_arrays(outs, [&] {
    return toast::layer_of(array_of(x), array_of(keys), array_of(values), array_if(scales),
                           array_if(own), array_if(sum), {first, length, position, causal != 0},
                           *layer, *given, mixture);
  });
}

}  // extern "C"
