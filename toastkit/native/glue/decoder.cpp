// Whole layers of gated delta nets (Qwen3-Next; kernels/recurrent.h) as MLX primitives.
#include "recurrent.h"

#include <algorithm>

#include "../kernels/rows.h"
#include "blocks.h"
#include "mixture.h"

namespace toast {
namespace {

using Products = std::unique_ptr<float[]>;

struct Sizes {
  int key_heads, value_heads, key_size, value_size;
  int keys() const { return key_heads * key_size; }
  int values() const { return value_heads * value_size; }
  int channels() const { return 2 * keys() + values(); }
};

// Arrays of a layer. REST: the convolution's weight and state, a_log, bias, norm, the rule's state.
constexpr int PROJECTIONS = 4, REST = 6;

// Sets pointers and strides into the projections: either two arrays, with queries, keys, values and
// z of each key head, and b and a of each (Qwen3-Next); or four, with queries, keys and values; z;
// b; a (Qwen3.5).
void set_views(toast_delta_layer &l, const float *const (&at)[PROJECTIONS]) {
  const int64_t each = l.value_heads / l.key_heads, keys = l.key_size, values = each * l.value_size;
  const int64_t heads = l.key_heads;
  if (at[2]) {
    const int64_t step = heads * (2 * keys + values), gates = heads * each;
    l.q = {at[0], step, keys}, l.k = {at[0] + heads * keys, step, keys};
    l.v = {at[0] + 2 * heads * keys, step, values}, l.z = {at[1], heads * values, values};
    l.b = {at[2], gates, each}, l.a = {at[3], gates, each};
  } else {
    const int64_t head = 2 * (keys + values), step = heads * head, gates = heads * 2 * each;
    l.q = {at[0], step, head}, l.k = {at[0] + keys, step, head};
    l.v = {at[0] + 2 * keys, step, head}, l.z = {at[0] + 2 * keys + values, step, head};
    l.b = {at[1], gates, 2 * each}, l.a = {at[1] + each, gates, 2 * each};
  }
}

// Width of each of `count` projections.
std::vector<int> widths(const Sizes &of, int count) {
  if (count == 2) return {of.channels() + of.values(), 2 * of.value_heads};
  return {of.channels(), of.values(), of.value_heads, of.value_heads};
}

// Throws std::invalid_argument unless the REST arrays, NULL where absent, fit together.
void check_rest(const mx::array *const (&rest)[REST], const Sizes &of, int batch) {
  check(of.key_heads > 0 && of.value_heads % of.key_heads == 0 && of.key_size > 0, "such heads");
  for (auto one : rest)
    check(!one || one->dtype() == mx::float32, "numbers that are no float32");
  auto is = [&](int i, const mx::Shape &shape) { return !rest[i] || rest[i]->shape() == shape; };
  const mx::array &weight = *rest[0];
  check(weight.ndim() == 3 && weight.shape(1) > 0 && weight.shape(1) <= MAX_KERNEL &&
            is(0, {of.channels(), weight.shape(1), 1}) &&
            is(1, {batch, weight.shape(1) - 1, of.channels()}),
        "a convolution of another shape");
  check(is(2, {of.value_heads}) && is(3, {of.value_heads}) && is(4, {of.value_size}) &&
            is(5, {batch, of.value_heads, of.value_size, of.key_size}),
        "parameters or a state of another shape");
}

// Convolution, delta rule and gated norm. projected, rest: NULL where absent. kernel: width of the
// convolution. last, after: new states of convolution and rule.
void step(const Sizes &of, const float *const (&projected)[PROJECTIONS],
          const float *const (&rest)[REST], int64_t batch, int64_t length, int64_t kernel,
          float eps, float *y, mx::array last, mx::array after) {
  toast_delta_layer l = {};
  l.batch = batch, l.length = length, l.key_heads = of.key_heads, l.value_heads = of.value_heads;
  l.key_size = of.key_size, l.value_size = of.value_size;
  set_views(l, projected);
  l.kernel = kernel, l.weight = rest[0], l.before = rest[1], l.a_log = rest[2], l.bias = rest[3];
  l.norm = rest[4], l.eps = eps, l.state = rest[5];
  need(toast_delta_layer_steps(&l, y, last.data<float>(), after.data<float>()));
}

// Shapes of the output and of both new states.
std::vector<mx::Shape> shapes_of(const Sizes &of, const mx::Shape &y, int kernel) {
  return {y, {y[0], kernel - 1, of.channels()},
          {y[0], of.value_heads, of.value_size, of.key_size}};
}

// objects: two or four projections, then the REST arrays. Returns y and both new states.
Arrays delta_layer(void **objects, Sizes of, float eps) {
  Arrays inputs;
  const auto given = collect_inputs(objects, PROJECTIONS + REST, inputs);
  check_floats(inputs);
  const int batch = inputs[0].shape(0), length = inputs[0].ndim() == 3 ? inputs[0].shape(1) : 0;
  const mx::array *rest[REST];
  for (int i = 0; i < REST; i++)
    rest[i] = array_if(objects[PROJECTIONS + i]);
  check_rest(rest, of, batch);
  const auto wide = widths(of, given[2] ? 4 : 2);
  for (size_t i = 0; i < wide.size(); i++)
    check(inputs[i].shape() == mx::Shape{batch, length, wide[i]}, "projections of another shape");
  const int kernel = rest[0]->shape(1);
  return lazy("ToastDeltaLayer", shapes_of(of, {batch, length, of.values()}, kernel),
              {mx::float32, mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-3];
    const OptionalFloats at(arrays, given);
    step(of, {at(0), at(1), at(2), at(3)}, {at(4), at(5), at(6), at(7), at(8), at(9)}, batch,
         length, kernel, eps, y.data<float>(), arrays.end()[-2], arrays.back());
  }, input_index(given, PROJECTIONS + REST - 1));
}

// Constants of a decoder layer. network.count: 0 if it has a mixture.
struct Decoder {
  Sizes of;
  float eps[3];  // of the input norm, the norm after attention, the gated norm in the rule
  int projections, kernel;
  bool begun;                        // there are states of earlier positions
  Packing packing[PROJECTIONS + 1];  // the last is the output projection
  bool biased[PROJECTIONS + 1];
  Network network;
  Mixture mixture;
  int activation_bits;
};
// Arrays besides parts: weights of both norms; convolution's weight, a_log, bias, gated norm.
constexpr int BESIDE = 6;

// sum = x + out_projection(rule(norm(x))), out = sum + network(norm(sum)); x float32 (B, L,
// columns). arrays, in order: x; both states, if begun; the BESIDE arrays; those of parts.
void decode(const Decoder &d, const Arrays &arrays) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length;
  std::vector<bool> given(3 + BESIDE, true);
  given[1] = given[2] = d.begun;
  const OptionalFloats at(arrays, given);
  const float *const x = at(0);
  mx::array y = arrays.end()[-3];
  float *out = y.data<float>();
  auto norm = [&](int i, const float *x) {
    const toast_vectors rows = {x, count, columns, TOAST_F32};
    need(toast_rms_norm(&rows, columns, at(3 + i), TOAST_F32, 0, d.eps[i], out, TOAST_F32));
  };
  size_t next = 1 + 2 * d.begun + BESIDE;
  // Multiplies by consecutive parts of the layer.
  auto multiplied = [&](int first, int some, const float *x, int64_t numbers, Products *made) {
    const Vectors vectors = {{x, count, numbers, TOAST_F32}, count};
    std::vector<Part> parts;
    std::vector<Result> results;
    parts.reserve(some);
    for (int i = 0; i < some; i++) {
      const Part &part =
          parts.emplace_back(arrays, next, d.packing[first + i], d.biased[first + i]);
      made[i].reset(new float[count * part.matrix->rows]);
      results.push_back({vectors, part, made[i].get()});
    }
    multiply(d.activation_bits, results);
  };
  norm(0, x);
  Products projected[PROJECTIONS], sum, ruled(new float[count * d.of.values()]);
  multiplied(0, d.projections, out, columns, projected);
  step(d.of, {projected[0].get(), projected[1].get(), projected[2].get(), projected[3].get()},
       {at(5), at(1), at(6), at(7), at(8), at(2)}, batch, length, d.kernel, d.eps[2], ruled.get(),
       arrays.end()[-2], arrays.back());
  multiplied(d.projections, 1, ruled.get(), d.of.values(), &sum);
  add_vectors(sum.get(), x, count, columns);
  norm(1, sum.get());
  if (d.network.count) {
    const Vectors inner = {{out, count, columns, TOAST_F32}, count};
    feed(d.network, arrays, next, inner, out, TOAST_F32);
  } else {
    mix(d.mixture, arrays, next, out, count, columns, out);
  }
  add_vectors(out, sum.get(), count, columns);
}

// before, state: NULL for both at the start of a sequence. parts: of the network or mixture.
Arrays decoded(const mx::array &x, const mx::array *before, const mx::array *state, Decoder d,
               const toast_operands &own, const mx::array *const (*parts)[GIVEN]) {
  check(x.ndim() == 3 && x.dtype() == mx::float32, "positions of another shape");
  check(!before == !state, "a layer that has half begun");
  const int columns = x.shape(2);
  Arrays inputs = {x};
  if ((d.begun = before)) inputs.push_back(*before), inputs.push_back(*state);
  const size_t first = inputs.size();
  for (int i = 0; i < BESIDE; i++) inputs.push_back(rest_of(own, i));
  for (int i = 0; i < 2; i++)
    check(rest_of(own, i).shape() == mx::Shape{columns} && rest_of(own, i).dtype() == mx::float32,
          "a weight of another length");
  check_rest({&rest_of(own, 2), before, &rest_of(own, 3), &rest_of(own, 4), &rest_of(own, 5),
              state}, d.of, x.shape(0));
  d.kernel = rest_of(own, 2).shape(1);
  const auto wide = widths(d.of, d.projections);
  for (int i = 0; i <= d.projections; i++) {
    const bool last = i == d.projections;
    const mx::array *part[GIVEN];
    d.packing[i] = part_of(own, i, d.biased[i], part);
    add_part(inputs, part, d.packing[i], last ? d.of.values() : columns);
    check(part[0]->shape(-2) == (last ? columns : wide[i]), "projections of another shape");
  }
  if (d.network.count) {
    add_network(inputs, parts, d.network, columns);
    check(parts[d.network.count - 1][0]->shape(-2) == columns, "rows of another length");
  } else {
    add_mixture(inputs, parts, d.mixture, columns);
  }
  const Weights weights = {first, inputs.size()};
  return lazy("ToastDecoder", shapes_of(d.of, x.shape(), d.kernel),
              {mx::float32, mx::float32, mx::float32}, std::move(inputs),
              [d](const Arrays &arrays) { decode(d, arrays); }, d.begun ? 2 : -1, weights);
}

}  // namespace
}  // namespace toast

// Each sets its first arguments, unshared arrays, to what kernels/recurrent.h computes. Lazy.
// Absent objects are NULL. Returns an error message or NULL.
extern "C" {

TOAST_API const char *toast_delta_layer_array(void *y, void *last, void *after, void **objects,
                                              int key_heads, int value_heads, int key_size,
                                              int value_size, float eps) {
  return toast::guarded([&] {
    auto made = toast::delta_layer(objects, {key_heads, value_heads, key_size, value_size}, eps);
    toast::array_of(y) = made[0];
    toast::array_of(last) = made[1];
    toast::array_of(after) = made[2];
  });
}

// Constants of a decoder layer. projections: 2 or 4. network: number of its parts, 0 for a mixture.
// eps: of the input norm, the norm after attention, the gated norm in the rule. Parts: projections,
// output projection, the network's. Other arrays: weights of both norms, convolution's weight,
// a_log, bias, gated norm.
typedef struct {
  int32_t key_heads, value_heads, key_size, value_size, projections, network, activation;
  float eps[3];
} toast_decoder;

// before, state: NULL for both at the start of a sequence. mixture: or NULL.
TOAST_API const char *toast_decoder_array(void *y, void *last, void *after, void *x, void *before,
                                          void *state, const toast_operands *given,
                                          const toast_decoder *is, const toast_mixture *mixture) {
  using toast::array_if, toast::array_of;
  return toast::guarded([&] {
    toast::check(is->projections == 2 || is->projections == 4, "other projections");
    toast::Decoder d = {};
    d.of = {is->key_heads, is->value_heads, is->key_size, is->value_size};
    std::copy_n(is->eps, 3, d.eps);
    d.projections = is->projections, d.activation_bits = given->activation_bits;
    const mx::array *parts[toast::MIXED][toast::GIVEN];
    if (mixture) {
      toast::check(!is->network, "two networks");
      d.mixture = toast::mixture_of(*mixture, parts);
    } else {
      d.network = toast::network_of(*given, is->projections + 1, is->network, false,
                                    is->activation, parts);
    }
    auto made = toast::decoded(array_of(x), array_if(before), array_if(state), d, *given, parts);
    array_of(y) = made[0];
    array_of(last) = made[1];
    array_of(after) = made[2];
  });
}

}  // extern "C"
