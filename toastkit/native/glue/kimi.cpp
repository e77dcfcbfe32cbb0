// Layers of Kimi Delta Attention (arXiv 2510.26692) as MLX primitives: layers of the common form
// with the gated delta rule, one decay per key column (kernels/recurrent.h), in place of attention.
#include <cmath>

#include "recurrent.h"

namespace toast {
namespace {

// Parts: queries, keys, values, out and the network's; then two low-rank factors of the decays, b,
// and two low-rank factors of the gates of y. VALUE_NORM is that of each head of y.
// toast_operands.rest has the convolutions' weights of queries and keys at KERNEL and KERNEL_BIAS;
// from BEHIND_FACTOR on, that of values, a_log and the bias of decays.
constexpr int SEQUENCES = 3;  // that are convolved: queries, keys, values
enum { FIRST_DECAYS, SECOND_DECAYS, RATES, FIRST_GATES, SECOND_GATES, DELTA_PARTS };
constexpr int DELTA_ARRAYS = SEQUENCES + 2;

struct Kimi {
  Layer layer;
  int heads, size, kernel;  // size: of a head
  Packing packing[DELTA_PARTS];
  Ending ending;
  bool begun;
  int numbers() const { return heads * size; }
};

// All projections of x (count, columns), (count, n) each. Arrays: as add_projections appends them.
struct Projected {
  std::unique_ptr<float[]> memory;
  float *sequences[SEQUENCES], *decays, *rates, *gates;
};

Projected project(const Kimi &k, const Arrays &arrays, size_t &at, const float *x, int64_t count,
                  int64_t columns) {
  const int64_t all = k.numbers(), heads = k.heads, bits = k.layer.activation_bits;
  std::vector<Part> parts;
  parts.reserve(SEQUENCES + DELTA_PARTS);
  for (int i = 0; i < SEQUENCES; i++)
    parts.emplace_back(arrays, at, k.layer.packing[i]);
  const Part *const more = parts.data() + SEQUENCES;
  for (int i = 0; i < DELTA_PARTS; i++) parts.emplace_back(arrays, at, k.packing[i]);
  const int64_t inner = more[FIRST_DECAYS].matrix.rows, outer = more[FIRST_GATES].matrix.rows;
  Projected p = {};
  p.memory.reset(new float[count * (5 * all + heads + inner + outer)]);
  float *next = p.memory.get();
  auto some = [&](int64_t numbers) { return std::exchange(next, next + count * numbers); };
  for (auto &one : p.sequences) one = some(all);
  p.decays = some(all), p.gates = some(all), p.rates = some(heads);
  float *const decays = some(inner), *const gates = some(outer);
  const Vectors rows = {{x, count, columns, TOAST_F32}, count};
  multiply(bits, {{rows, parts[0], p.sequences[0]}, {rows, parts[1], p.sequences[1]},
                  {rows, parts[2], p.sequences[2]}});
  multiply(bits, {{rows, more[FIRST_DECAYS], decays}, {rows, more[FIRST_GATES], gates},
                  {rows, more[RATES], p.rates}});
  const Vectors of_decays = {{decays, count, inner, TOAST_F32}, count};
  const Vectors of_gates = {{gates, count, outer, TOAST_F32}, count};
  multiply(bits, {{of_decays, more[SECOND_DECAYS], p.decays},
                  {of_gates, more[SECOND_GATES], p.gates}});
  return p;
}

// out = silu(convolution(x)) of queries, keys or values. last: the convolution's new state. before:
// its state; NULL for zeros.
void convolve(const Kimi &k, const float *x, const float *weight, const float *before,
              int64_t batch, int64_t length, float *out, float *last) {
  const int64_t all = k.numbers(), rows = k.kernel - 1;
  const toast_convolution convolution = {
      batch, length, all, k.kernel, x, {length * all, all}, before, {rows * all, all}, TOAST_F32,
      weight, nullptr, TOAST_F32, 1, all,
  };
  need(toast_convolve(&convolution, out, TOAST_F32));
  save_last_rows(x, batch, length, all, before, rows, all, last);
}

// arrays, in order: x; states of the three convolutions and of the rule, if begun; input norm;
// those of add_projections; norm of y; those of finish_layer; the mixture's. Outputs: those of the
// layer, the new states.
void compute(const Kimi &k, const Arrays &arrays) {
  const Layer &layer = k.layer;
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, all = k.numbers();
  mx::array after = arrays.back();
  Contiguous x(arrays[0]);
  std::unique_ptr<float[]> memory(new float[count * (columns + 4 * all)]);
  float *const normed = memory.get(), *const y = normed + count * columns;
  size_t at = 1 + (SEQUENCES + 1) * k.begun;
  apply_norm(layer, FIRST_NORM, arrays, at, x.floats(), count * columns, normed);
  const Projected p = project(k, arrays, at, normed, count, columns);
  float *convolved[SEQUENCES];
  for (int i = 0; i < SEQUENCES; i++) {
    Contiguous weight(arrays[at++]), before(arrays[k.begun ? 1 + i : 0]);
    mx::array last = arrays.end()[i - 1 - SEQUENCES];
    convolved[i] = y + (1 + i) * count * all;
    convolve(k, p.sequences[i], weight.floats(), k.begun ? before.floats() : nullptr, batch,
             length, convolved[i], last.data<float>());
  }
  Contiguous a_log(arrays[at++]), bias(arrays[at++]), state(arrays[k.begun ? 1 + SEQUENCES : 0]);
  const double scale = std::pow(double(k.size), -0.5), square = scale * scale;
  for (int i = 0; i < 2; i++) {  // L2 norms, eps 1e-6: queries to size^-1/2, keys to 1
    const toast_vectors heads = {convolved[i], count * k.heads, k.size, TOAST_F32};
    need(toast_rms_norm(&heads, k.size, nullptr, TOAST_F32, float(i ? scale : square),
                        float(1e-6 * square), convolved[i], TOAST_F32));
  }
  const toast_delta delta = {
      batch, length, k.heads, k.heads, k.size, k.size, convolved[0], convolved[1], convolved[2],
      p.decays, p.rates, a_log.floats(), bias.floats(), 1, 1, nullptr,
      k.begun ? state.floats() : nullptr,
  };
  need(toast_gated_delta(&delta, y, after.data<float>()));
  apply_norm(layer, VALUE_NORM, arrays, at, y, count * all, y);
  need(toast_gate(p.gates, y, count * all, TOAST_F32, TOAST_SIGMOID, y));
  const size_t outs = arrays.size() - 1 - SEQUENCES - k.ending.outputs;
  end_layer(layer, k.ending, arrays, at, x.floats(), y, count, outs);
}

// Appends the arrays of projections, convolutions, a_log and bias.
void add_projections(Arrays &inputs, Kimi &k, const toast_operands &given) {
  const int64_t columns = inputs[0].shape(-1);
  const int all = k.numbers(), places = OUT + 1 + k.layer.is.network;
  for (int i = 0; i < SEQUENCES; i++)
    check(add_layer_part(inputs, k.layer, i, given, i, columns) == all,
          "sequences of other lengths");
  int64_t inner = columns;
  for (int i = 0; i < DELTA_PARTS; i++) {
    const GivenPart part = part_of(given, places + i);
    const bool second = i == SECOND_DECAYS || i == SECOND_GATES;
    k.packing[i] = add_part(inputs, part, second ? inner : columns);
    inner = part.weight->shape(-2);
    check(i == RATES ? inner == k.heads : !second || inner == all, "gates of another length");
  }
  const int at[DELTA_ARRAYS] = {KERNEL, KERNEL_BIAS, BEHIND_FACTOR, BEHIND_FACTOR + 1,
                                BEHIND_FACTOR + 2};
  for (int i = 0; i < DELTA_ARRAYS; i++) {
    const mx::array &one = rest_of(given, at[i]);
    const bool fits = i < SEQUENCES    ? one.shape() == mx::Shape{all, k.kernel, 1}
                      : i == SEQUENCES ? one.size() == size_t(k.heads)
                                       : one.size() == size_t(all);
    check(fits && one.dtype() == mx::float32, "parameters of another shape");
    inputs.push_back(one);
  }
}

// before: states of the convolutions, and of the rule; all NULL at the start of a sequence.
Arrays kimi_layer(const mx::array &x, void **before, const toast_layer &is, int size,
                  const toast_operands &given, const toast_mixture *mixture) {
  check(!is.layer_norms && !is.parallel && is.heads > 0 && size > 0, "layer norms, or no heads");
  Kimi k = {{is}, is.heads, size, 0, {}, {}, before[0] != nullptr};
  Layer &layer = k.layer;
  const mx::array &weight = rest_of(given, KERNEL);
  check(weight.ndim() == 3 && weight.shape(1) > 0 && weight.shape(1) <= MAX_KERNEL,
        "a convolution of another shape");
  k.kernel = weight.shape(1);
  const int batch = x.shape(0), all = k.numbers();
  std::vector<mx::Shape> states(SEQUENCES, {batch, k.kernel - 1, all});
  states.push_back({batch, k.heads, size, size});
  Arrays inputs = begin_layer(x, before, states);
  const int64_t columns = x.shape(2);
  check(given.rest[FIRST_NORM] && given.rest[VALUE_NORM], "no norms");
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  add_projections(inputs, k, given);
  add_norm(inputs, layer, VALUE_NORM, given, size, size);
  k.ending = add_ending(inputs, layer, given, all, mixture);
  return lazy_layer("ToastKimiLayer", std::move(inputs), states, k.ending, k.begun,
                    [k](const Arrays &arrays) { compute(k, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer (one array; two, the sum and its norm, if
// its network is computed elsewhere) and its new states: of the convolutions of queries, keys and
// values, and of the rule. q, k, v, state: those before, all NULL at the start of a sequence. size:
// of a head. mixture: its network, or NULL. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_kimi_layer_array(void **outs, void *x, void *q, void *k, void *v,
                                             void *state, const toast_operands *given,
                                             const toast_layer *layer, const int32_t *size,
                                             const toast_mixture *mixture) {
  void *before[] = {q, k, v, state};
  return set_arrays(outs, [&] {
    return toast::kimi_layer(array_of(x), before, *layer, *size, *given, mixture);
  });
}

}  // extern "C"
