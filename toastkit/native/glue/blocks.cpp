// The parts of a decoder layer before and after its attention, as functions of kernels and as MLX
// primitives. Results equal those of the single float32 operations to the bit.
#include <algorithm>
#include <numeric>
#include <optional>

#include "latent.h"
#include "mixture.h"

namespace toast {

void add_norm(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int64_t length,
              int64_t other) {
  if (!(layer.has[i] = given.rest[i])) return;
  const mx::array &weight = rest_of(given, i);
  check(weight.ndim() == 1 && (weight.shape(0) == length || weight.shape(0) == other),
        "a weight of another length");
  type_of(weight);
  inputs.push_back(weight);
  if (!layer.is.layer_norms || i > SECOND_NORM || !given.rest[NORM_BIASES + i]) return;
  const mx::array &bias = rest_of(given, NORM_BIASES + i);
  check(bias.shape() == weight.shape() && bias.dtype() == weight.dtype(), "a norm of other biases");
  inputs.push_back(bias);
  layer.biased_norms[i] = true;
}

int add_layer_part(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int place,
                   int64_t columns, int stack) {
  const GivenPart part = part_of(given, place);
  layer.packing[i] = add_part(inputs, part, columns, stack != 0);
  check(!stack || part.weight->shape(0) == stack, "a stack of another size");
  return part.weight->shape(-2);
}

void apply_norm(const Layer &layer, int i, const Arrays &arrays, size_t &at, const float *x,
                int64_t numbers, float *out, int64_t stride) {
  const mx::array &weight = arrays[at++];
  Contiguous weights(weight);
  const int64_t length = weight.shape(0);
  const toast_vectors rows = {x, numbers / length, stride ? stride : length, TOAST_F32};
  if (layer.is.layer_norms && i <= SECOND_NORM) {
    std::unique_ptr<Contiguous> biases(layer.biased_norms[i] ? new Contiguous(arrays[at++])
                                                             : nullptr);
    need(toast_layer_norm(&rows, length, weights.data(), biases ? biases->data() : nullptr,
                          type_of(weight), layer.is.eps[i], out, TOAST_F32));
    return;
  }
  need(toast_rms_norm(&rows, length, weights.data(), type_of(weight), layer.is.plus,
                      layer.is.eps[i], out, TOAST_F32));
}

void add_rotation(Arrays &inputs, const Layer &layer, const toast_operands &given, int size) {
  const int32_t dims = layer.is.dims;
  check(dims > 0 && dims % 2 == 0 && dims <= size, "so many numbers of a head");
  const mx::array &frequencies = rest_of(given, FREQUENCIES);
  check(frequencies.dtype() == mx::float32 && frequencies.shape() == mx::Shape{dims / 2},
        "frequencies of another shape");
  inputs.push_back(frequencies);
}

toast_rotation rotation_of(const toast_layer &is, const float *frequencies,
                           const int32_t *positions, int64_t rows) {
  return {is.dims, frequencies, is.inverse, positions, rows, is.rotation_scale, is.factor,
          is.traditional};
}

void add_residual(const Layer &layer, int i, const Arrays &arrays, size_t &at, float *x,
                  const float *y, int64_t count, int64_t columns) {
  if (layer.has[i]) apply_norm(layer, i, arrays, at, x, count * columns, x);
  const float multiplier = layer.is.multiplier;
  for (int64_t k = 0; multiplier != 1 && k < count * columns; k++) x[k] *= multiplier;
  add_vectors(x, y, count, columns);
}

void check_hidden_states(const mx::array &x) {
  check(x.ndim() == 3 && x.dtype() == mx::float32, "positions of another shape");
}

void add_head_projections(Arrays &inputs, Layer &layer, const toast_operands &given) {
  const int64_t columns = inputs[0].shape(-1);
  const int heads[HEADS] = {layer.is.heads, layer.is.key_heads, layer.is.key_heads};
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  for (int i = 0; i < (layer.is.shares_cache ? 1 : HEADS); i++) {
    const int all = add_layer_part(inputs, layer, i, given, i, columns);
    const int joined = layer.is.fused_head;
    const int each = !i && layer.is.gated == 1 ? 2 : 1;
    const int parts = joined ? heads[0] + 2 * heads[1] : heads[i] * each;
    check(parts > 0 && all > 0 && all % parts == 0, "heads of other sizes");
    layer.size[i] = all / parts;
    check(!joined || (layer.size[i] == joined && layer.is.gated != 1), "heads of another size");
    check(!layer.is.grouped || (joined && heads[1] > 0 && heads[0] % heads[1] == 0),
          "groups of other heads");
  }
  if (layer.is.gated == 2)
    check(!layer.is.layer_input &&
              add_layer_part(inputs, layer, GATES, given, OUT + 1 + layer.is.network, columns) ==
                  heads[0] * layer.size[0],
          "gates of other heads");
  if (layer.is.shares_cache) {
    check(!layer.is.gated && !layer.is.fused_head && heads[1] > 0 && !given.rest[KEY_NORM] &&
              !given.rest[VALUE_NORM],
          "keys and values of its own");
    layer.size[1] = layer.size[2] = layer.size[0];
  }
  for (int i = 0; i < HEADS; i++)
    add_norm(inputs, layer, QUERY_NORM + i, given, layer.size[i],
             layer.size[i] * (layer.is.norm_after_rope ? 1 : heads[i]));
}

void add_finish(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended) {
  const int columns = inputs[0].shape(-1), count = layer.is.network;
  check(count || (!layer.is.layer_input && !given.rest[FACTOR]),
        "more behind a network that is none of its parts");
  check(!layer.is.parallel ||
            (count && given.rest[SECOND_NORM] && !given.rest[ATTENDED_NORM] &&
             !given.rest[FED_NORM] && layer.is.multiplier == 1 && !layer.is.layer_input),
        "a network beside attention with other norms");
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, layer, SECOND_NORM, given, columns, columns);
  check(add_layer_part(inputs, layer, OUT, given, OUT, attended) == columns,
        "rows of another length");
  add_norm(inputs, layer, ATTENDED_NORM, given, columns, columns);
  if (!count) return;
  layer.network = add_network(inputs, given, HEADS + 1, count, columns, layer.is.activation);
  check(layer.network.rows == columns, "rows of another length");
  add_norm(inputs, layer, FED_NORM, given, columns, columns);
  if (const int own = layer.is.layer_input) {
    const int place = OUT + 1 + count;
    check(own > 0 && given.rest[INPUT_NORM] &&
              add_layer_part(inputs, layer, INPUT_GATE, given, place, columns) == own &&
              add_layer_part(inputs, layer, INPUT_PROJECTION, given, place + 1, own) == columns,
          "an input of its own of another length");
    add_norm(inputs, layer, INPUT_NORM, given, columns, columns);
  }
  if ((layer.scaled = given.rest[FACTOR])) {
    const mx::array &factor = rest_of(given, FACTOR);
    check(factor.dtype() == mx::float32 && factor.shape() == mx::Shape{1}, "no factor");
    inputs.push_back(factor);
  }
}

bool is_attention_only(const Layer &layer) { return !layer.is.network && !layer.has[SECOND_NORM]; }

void add_layer_input(Arrays &inputs, const Layer &layer, const mx::array *own) {
  check(!own == !layer.is.layer_input, "an input of its own that is not there, or not asked for");
  if (!own) return;
  mx::Shape shape = inputs[0].shape();
  shape.back() = layer.is.layer_input;
  check(own->shape() == shape && own->dtype() == mx::float32,
        "an input of its own of another shape");
  inputs.push_back(*own);
}

void project_heads(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                   int64_t count, float *const (&outs)[HEADS], float *gates) {
  const toast_layer &is = layer.is;
  const int64_t columns = arrays[0].shape(-1);
  std::unique_ptr<float[]> normed(layer.has[FIRST_NORM] ? new float[count * columns] : nullptr);
  if (normed) apply_norm(layer, FIRST_NORM, arrays, at, x, count * columns, normed.get());
  const Vectors vectors = {{normed ? normed.get() : x, count, columns, TOAST_F32}, count};
  std::optional<Part> parts[HEADS];
  for (int i = 0; i < (is.shares_cache ? 1 : HEADS); i++)
    parts[i].emplace(arrays, at, layer.packing[i]);
  std::optional<Part> apart;
  if (gates && is.gated == 2) apart.emplace(arrays, at, layer.packing[GATES]);
  const bool mixed = is.grouped || (gates && !apart);
  std::unique_ptr<float[]> both(mixed ? new float[count * parts[0]->matrix.rows] : nullptr);
  const int64_t joined = is.grouped ? 0 : is.fused_head;
  const int64_t wide = joined * is.heads, narrow = joined * is.key_heads;
  std::vector<Result> results = {
      {vectors, *parts[0], both ? both.get() : outs[0], TOAST_F32, 0, wide}};
  if (!is.shares_cache && !is.grouped) {
    results.push_back({vectors, *parts[1], outs[1], TOAST_F32, wide, narrow});
    results.push_back({vectors, *parts[2], outs[2], TOAST_F32, wide + narrow, narrow});
  }
  if (apart) results.push_back({vectors, *apart, gates});
  multiply(layer.activation_bits, results);
  const float *from = both.get();
  const int64_t size = layer.size[0], queries = is.grouped ? size * is.heads / is.key_heads : size;
  auto take = [&](float *to, int64_t h, int64_t numbers) {
    std::copy_n(from, numbers, to + h * numbers), from += numbers;
  };
  for (int64_t h = 0; both && h < count * (is.grouped ? is.key_heads : is.heads); h++) {
    take(outs[0], h, queries);
    take(is.grouped ? outs[1] : gates, h, size);
    if (is.grouped) take(outs[2], h, size);
  }
  if (!is.norm_after_rope) norm_heads(layer, arrays, at, count, outs);
}

void norm_heads(const Layer &layer, const Arrays &arrays, size_t &at, int64_t count,
                float *const (&heads)[HEADS]) {
  for (int i = 0; i < HEADS; i++)
    if (layer.has[QUERY_NORM + i])
      apply_norm(layer, QUERY_NORM + i, arrays, at, heads[i],
           count * layer.size[i] * (i ? layer.is.key_heads : layer.is.heads), heads[i]);
}

void add_vectors(float *x, const float *y, int64_t count, int64_t columns) {
  std::vector<uint32_t> each(count);
  std::iota(each.begin(), each.end(), 0);
  need(toast_add_rows(x, count, columns, y, count, each.data()));
}

namespace {

// out += norm(projection(activation(gate(out)) * own)).
void apply_layer_input(const Layer &layer, const Arrays &arrays, size_t &at, const float *own,
                       int64_t count, int64_t columns, float *out) {
  const int64_t numbers = layer.is.layer_input;
  std::unique_ptr<float[]> memory(new float[count * (numbers + columns)]);
  float *const gates = memory.get(), *const more = gates + count * numbers;
  const Part gate(arrays, at, layer.packing[INPUT_GATE]);
  const Part product(arrays, at, layer.packing[INPUT_PROJECTION]);
  const Vectors sums = {{out, count, columns, TOAST_F32}, count};
  const Vectors inner = {{gates, count, numbers, TOAST_F32}, count};
  multiply(layer.activation_bits, {{sums, gate, gates}});
  need(toast_gate(gates, own, count * numbers, TOAST_F32, layer.is.activation, gates));
  multiply(layer.activation_bits, {{inner, product, more}});
  apply_norm(layer, INPUT_NORM, arrays, at, more, count * columns, more);
  add_vectors(out, more, count, columns);
}

// out = sum + network(norm(x)) + x; out may be x. second: index of the norm's weight.
void finish_parallel(const Layer &layer, const Arrays &arrays, size_t second, size_t &at,
                     const float *x, int64_t count, const float *sum, float *out) {
  const int64_t columns = arrays[0].shape(-1);
  std::unique_ptr<float[]> memory(new float[count * columns]);
  float *const fed = memory.get();
  apply_norm(layer, SECOND_NORM, arrays, second, x, count * columns, fed);
  const Vectors inner = {{fed, count, columns, TOAST_F32}, count};
  feed(layer.network, arrays, at, inner, fed, TOAST_F32);
  for (int64_t i = 0; i < count * columns; i++) out[i] = sum[i] + fed[i] + x[i];
}

}  // namespace

void finish_layer(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                  const float *attended, int64_t count, float *sum, float *out, const float *own) {
  const int64_t columns = arrays[0].shape(-1);
  size_t second = at;
  at += layer.has[SECOND_NORM] + layer.biased_norms[1];
  const Part part(arrays, at, layer.packing[OUT]);
  const Vectors vectors = {{attended, count, part.matrix.columns, TOAST_F32}, count};
  multiply(layer.activation_bits, {{vectors, part, sum}});
  if (layer.is.parallel) return finish_parallel(layer, arrays, second, at, x, count, sum, out);
  add_residual(layer, ATTENDED_NORM, arrays, at, sum, x, count, columns);
  const bool normed = layer.has[SECOND_NORM];
  if (normed) apply_norm(layer, SECOND_NORM, arrays, second, sum, count * columns, out);
  if (!layer.network.count) return;
  const Vectors inner = {{normed ? out : sum, count, columns, TOAST_F32}, count};
  feed(layer.network, arrays, at, inner, out, TOAST_F32);
  add_residual(layer, FED_NORM, arrays, at, out, sum, count, columns);
  if (own) apply_layer_input(layer, arrays, at, own, count, columns, out);
  if (!layer.scaled) return;
  const float factor = *arrays[at++].data<float>();
  for (int64_t i = 0; i < count * columns; i++) out[i] *= factor;
}

namespace {

// Queries, keys and values of x (B, L, columns), and gates if the layer has them: (B, heads, L,
// size) each; queries alone if it shares a cache.
Arrays projected(const mx::array &x, Layer layer, const toast_operands &given) {
  check_hidden_states(x);
  Arrays inputs = {x};
  add_head_projections(inputs, layer, given);
  std::vector<mx::Shape> shapes;
  const int some = layer.is.shares_cache ? 1 : layer.is.gated ? HEADS + 1 : HEADS;
  for (int i = 0; i < some; i++) {
    const bool keys = i && i < HEADS;
    shapes.push_back({x.shape(0), keys ? layer.is.key_heads : layer.is.heads, x.shape(1),
                      layer.size[i % HEADS]});
  }
  const Weights weights = {1, inputs.size()};
  return lazy("ToastProjected", std::move(shapes), std::vector<mx::Dtype>(some, mx::float32),
              std::move(inputs), [layer, some](const Arrays &arrays) {
    Contiguous rows(arrays[0]);
    float *outs[HEADS + 1] = {};
    for (int i = 0; i < some; i++) {
      mx::array out = arrays[arrays.size() - some + i];
      outs[i] = out.data<float>();
    }
    size_t at = 1;
    project_heads(layer, arrays, at, rows.floats(), int64_t(arrays[0].size()) / arrays[0].shape(-1),
                  {outs[0], outs[1], outs[2]}, outs[HEADS]);
  }, allocate_by_position, weights);
}

// Heads (B, heads, L, size) as rows (B * L, heads * size): in place if memory order allows, else a
// copy.
class MergedHeads {
 public:
  explicit MergedHeads(const mx::array &a) : data_(a.data<float>()) {
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

// finish_layer of x (B, L, columns) and the attention output (B, heads, L, size): the layer's
// output, or without a network the sum and its norm. gates: shaped as attended, or NULL.
Arrays finished(const mx::array &x, const mx::array &attended, const mx::array *gates,
                const mx::array *own, Layer layer, const toast_operands &given) {
  check_hidden_states(x);
  check(attended.ndim() == 4 && attended.dtype() == mx::float32 &&
            attended.shape(0) == x.shape(0) && attended.shape(2) == x.shape(1),
        "heads of another shape");
  Arrays inputs = {x};
  add_value_projection(inputs, layer, given);
  const int64_t size = layer.value ? layer.value : attended.shape(3);
  check(!layer.value || attended.shape(3) == layer.is.latent, "heads of another size");
  const Ending ending = add_ending(inputs, layer, given, attended.shape(1) * size, nullptr);
  const Weights weights = {1, inputs.size()};
  add_layer_input(inputs, layer, own);
  check(!gates == !layer.is.gated && (!gates || (gates->shape() == attended.shape() &&
                                                 gates->dtype() == mx::float32)),
        "gates of another shape");
  if (gates) inputs.push_back(*gates);
  inputs.push_back(attended);
  const size_t outputs = ending.outputs;
  return lazy("ToastClosed", std::vector<mx::Shape>(outputs, x.shape()),
              std::vector<mx::Dtype>(outputs, mx::float32), std::move(inputs),
              [layer, ending](const Arrays &arrays) {
    const size_t outs = arrays.size() - ending.outputs;
    const int64_t count = int64_t(arrays[0].size()) / arrays[0].shape(-1);
    Contiguous rows(arrays[0]);
    const MergedHeads heads(arrays[outs - 1]);
    std::optional<Contiguous> own;
    if (layer.is.layer_input) own.emplace(arrays[outs - 2 - (layer.is.gated != 0)]);
    size_t at = 1;
    std::unique_ptr<float[]> values, gated;
    const float *attended = project_values(layer, arrays, at, heads.data(), count, values);
    if (layer.is.gated) {
      const mx::array &gates = arrays[outs - 2];
      gated.reset(new float[gates.size()]);
      need(toast_gate(MergedHeads(gates).data(), attended, int64_t(gates.size()), TOAST_F32,
                      TOAST_SIGMOID, gated.get()));
      attended = gated.get();
    }
    end_layer(layer, ending, arrays, at, rows.floats(), attended, count, outs,
              own ? own->floats() : nullptr);
  }, -1, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Set `outs`, unshared arrays, to the projections before attention (queries, keys, values, and
// gates if any; or queries alone), and to the layer's output given what attention returned (one
// array, two without a network). own: per-layer input, or NULL, as gates. Lazy. Return an error
// message or NULL.
TOAST_API const char *toast_projected_array(void **outs, void *x, const toast_operands *given,
                                            const toast_layer *layer) {
  return set_arrays(outs, [&] { return toast::projected(array_of(x), {*layer}, *given); });
}

TOAST_API const char *toast_closed_array(void **outs, void *x, void *attended, void *gates,
                                         void *own, const toast_operands *given,
                                         const toast_layer *layer) {
  return set_arrays(outs, [&] {
    return toast::finished(array_of(x), array_of(attended), array_if(gates), array_if(own),
                           {*layer}, *given);
  });
}

}  // extern "C"
