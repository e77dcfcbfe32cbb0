// Whole layers of gated delta nets (Qwen3-Next; kernels/recurrent.h) as MLX primitives.
#include "recurrent.h"

extern "C" {

// Constants of a gated delta net. projections: 2 or 4.
typedef struct {
  int32_t key_heads, value_heads, key_size, value_size, projections;
} toast_delta_net;

}  // extern "C"

namespace toast {
namespace {

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
          float eps, float *y, float *last, float *after) {
  toast_delta_layer l = {};
  l.batch = batch, l.length = length, l.key_heads = of.key_heads, l.value_heads = of.value_heads;
  l.key_size = of.key_size, l.value_size = of.value_size;
  set_views(l, projected);
  l.kernel = kernel, l.weight = rest[0], l.before = rest[1], l.a_log = rest[2], l.bias = rest[3];
  l.norm = rest[4], l.eps = eps, l.state = rest[5];
  need(toast_delta_layer_steps(&l, y, last, after));
}

// Shapes of the states of convolution and rule.
std::vector<mx::Shape> states_of(const Sizes &of, int batch, int kernel) {
  return {{batch, kernel - 1, of.channels()},
          {batch, of.value_heads, of.value_size, of.key_size}};
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
  auto shapes = states_of(of, batch, kernel);
  shapes.insert(shapes.begin(), {batch, length, of.values()});
  return lazy("ToastDeltaLayer", std::move(shapes), {mx::float32, mx::float32, mx::float32},
              std::move(inputs), [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-3], last = arrays.end()[-2], after = arrays.back();
    const OptionalFloats at(arrays, given);
    step(of, {at(0), at(1), at(2), at(3)}, {at(4), at(5), at(6), at(7), at(8), at(9)}, batch,
         length, kernel, eps, y.data<float>(), last.data<float>(), after.data<float>());
  }, input_index(given, PROJECTIONS + REST - 1));
}

// A layer of the common form. Parts: three projections, of which the last two are one if there are
// two; out, the network's; the fourth projection. VALUE_NORM is that of each head of y. From
// BEHIND_FACTOR on there are a_log and bias.
struct Decoder {
  Layer layer;
  Ending ending;
  Sizes of;
  int projections, kernel;
  bool begun;
};
constexpr int PLACES[PROJECTIONS] = {0, 1, 2, GATES};  // of the projections in Layer
constexpr int PARAMETERS[] = {KERNEL, BEHIND_FACTOR, BEHIND_FACTOR + 1, VALUE_NORM};

// arrays, in order: x; both states, if begun; input norm; projections; PARAMETERS; those of
// finish_layer; the mixture's. Outputs: those of the layer, the new states.
void compute(const Decoder &d, const Arrays &arrays) {
  const Layer &layer = d.layer;
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length;
  mx::array last = arrays.end()[-2], after = arrays.back();
  Contiguous x(arrays[0]), before(arrays[d.begun]), state(arrays[2 * d.begun]);
  std::unique_ptr<float[]> normed(new float[count * columns]), projected[PROJECTIONS];
  size_t at = 1 + 2 * d.begun;
  apply_norm(layer, FIRST_NORM, arrays, at, x.floats(), count * columns, normed.get());
  const Vectors vectors = {{normed.get(), count, columns, TOAST_F32}, count};
  std::vector<Part> parts;
  std::vector<Result> results;
  parts.reserve(PROJECTIONS);
  for (int i = 0; i < d.projections; i++) {
    const int place = PLACES[i];
    const Part &part = parts.emplace_back(arrays, at, layer.packing[place]);
    projected[i].reset(new float[count * part.matrix.rows]);
    results.push_back({vectors, part, projected[i].get()});
  }
  multiply(layer.activation_bits, results);
  Contiguous weight(arrays[at++]), a_log(arrays[at++]), bias(arrays[at++]), norm(arrays[at++]);
  std::unique_ptr<float[]> y(new float[count * d.of.values()]);
  step(d.of, {projected[0].get(), projected[1].get(), projected[2].get(), projected[3].get()},
       {weight.floats(), d.begun ? before.floats() : nullptr, a_log.floats(), bias.floats(),
        norm.floats(), d.begun ? state.floats() : nullptr},
       batch, length, d.kernel, layer.is.eps[VALUE_NORM], y.get(), last.data<float>(),
       after.data<float>());
  end_layer(layer, d.ending, arrays, at, x.floats(), y.get(), count,
            arrays.size() - 2 - d.ending.outputs);
}

// before: both states, NULL at the start of a sequence.
Arrays decoded(const mx::array &x, void **before, const toast_layer &is, const toast_delta_net &net,
               const toast_operands &given, const toast_mixture *mixture) {
  const Sizes of = {net.key_heads, net.value_heads, net.key_size, net.value_size};
  check(net.projections == 2 || net.projections == 4, "other projections");
  check(given.rest[FIRST_NORM] && !is.layer_norms && !is.parallel, "no norm, or layer norms");
  check_rest({&rest_of(given, KERNEL), nullptr, &rest_of(given, BEHIND_FACTOR),
              &rest_of(given, BEHIND_FACTOR + 1), &rest_of(given, VALUE_NORM), nullptr},
             of, x.shape(0));
  const int kernel = rest_of(given, KERNEL).shape(1);
  Decoder d = {{is}, {}, of, net.projections, kernel, before[0] != nullptr};
  Layer &layer = d.layer;
  const auto states = states_of(of, x.shape(0), kernel);
  Arrays inputs = begin_layer(x, before, states);
  const int64_t columns = x.shape(-1);
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  const auto wide = widths(of, d.projections);
  for (int i = 0; i < d.projections; i++) {
    const int place = i < HEADS ? i : OUT + 1 + is.network;
    check(add_layer_part(inputs, layer, PLACES[i], given, place, columns) == wide[i],
          "projections of another shape");
  }
  for (int i : PARAMETERS) inputs.push_back(rest_of(given, i));
  d.ending = add_ending(inputs, layer, given, of.values(), mixture);
  return lazy_layer("ToastDecoder", std::move(inputs), states, d.ending, d.begun,
                    [d](const Arrays &arrays) { compute(d, arrays); });
}

}  // namespace
}  // namespace toast

// Each sets its first argument, unshared arrays, to what kernels/recurrent.h computes. Lazy.
// Absent objects are NULL. Returns an error message or NULL.
extern "C" {

TOAST_API const char *toast_delta_layer_array(void **outs, void **objects, int key_heads,
                                              int value_heads, int key_size, int value_size,
                                              float eps) {
  return set_arrays(outs, [&] {
    return toast::delta_layer(objects, {key_heads, value_heads, key_size, value_size}, eps);
  });
}

// before, state: NULL for both at the start of a sequence. mixture: the network, or NULL.
TOAST_API const char *toast_decoder_array(void **outs, void *x, void *before, void *state,
                                          const toast_operands *given, const toast_layer *layer,
                                          const toast_delta_net *net,
                                          const toast_mixture *mixture) {
  void *states[] = {before, state};
  return set_arrays(outs, [&] {
    return toast::decoded(array_of(x), states, *layer, *net, *given, mixture);
  });
}

}  // extern "C"
