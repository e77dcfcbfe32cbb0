// Mixers of Mamba-2 (kernels/recurrent.h) as MLX primitives: between their products, and as whole
// layers of the common form, where attention would be.
#include "blocks.h"
#include "mixture.h"
#include "recurrent.h"

extern "C" {

// What of a mixer is the same at every step. numbers: of a state's rows. normed: of y that are
// normed together, or 0 where none are. least, most: of a step.
typedef struct {
  int32_t heads, groups, numbers, normed;
  float least, most;
} toast_mixer;

}  // extern "C"

namespace toast {
namespace {

// channels: of x, and of B and C of each group, which are convolved.
struct Mixer {
  toast_mixer is;
  int channels, kernel;
  int inner() const { return channels - 2 * is.groups * is.numbers; }
  int all() const { return inner() + channels + is.heads; }
};

// What a mixer steps with: what steps are projected to, the convolution's weight and bias, what
// came before, a_log, d, dt's bias, the state.
enum { PROJECTED, CONVOLUTION, CONVOLUTION_BIAS, BEFORE, A_LOG, D, DT_BIAS, STATE, STEPS_WITH };

// All steps: gates of y, which are left, what is convolved, and dt.
void mixer_steps(const Mixer &m, const float *const (&with)[STEPS_WITH], int64_t batch,
                 int64_t length, float *y, float *last, float *after) {
  const int64_t steps = batch * length, all = m.all(), inner = m.inner(), rows = m.kernel - 1;
  const int64_t numbers = m.is.groups * m.is.numbers, heads = m.is.heads;
  std::unique_ptr<float[]> memory(new float[steps * (2 * m.channels + heads)]);
  float *const convolved = memory.get(), *const x = convolved + steps * m.channels;
  float *const b = x + steps * inner, *const c = b + steps * numbers;
  float *const dt = c + steps * numbers;
  const float *const projected = with[PROJECTED];
  const toast_convolution convolution = {
      batch, length, m.channels, m.kernel, projected + inner, {length * all, all}, with[BEFORE],
      {rows * m.channels, m.channels}, TOAST_F32, with[CONVOLUTION], with[CONVOLUTION_BIAS],
      TOAST_F32, 1, m.channels,
  };
  need(toast_convolve(&convolution, convolved, TOAST_F32));
  for (int64_t i = 0; i < steps; i++) {
    const float *from = convolved + i * m.channels;
    std::copy_n(from, inner, x + i * inner);
    std::copy_n(from + inner, numbers, b + i * numbers);
    std::copy_n(from + inner + numbers, numbers, c + i * numbers);
    std::copy_n(projected + (i + 1) * all - heads, heads, dt + i * heads);
  }
  const toast_scan scan = {
      batch, length, heads, inner / heads, m.is.groups, m.is.numbers,
      x, b, c, dt, with[A_LOG], with[D], with[DT_BIAS], m.is.least, m.is.most, 0, nullptr,
      with[STATE],
  };
  need(toast_scan_steps(&scan, y, after));
  keep_last(projected + inner, batch, length, all, with[BEFORE], rows, m.channels, last);
}

// A mixer with these arrays besides what steps are projected to, NULL for what is not given.
// Raises std::invalid_argument where they do not fit together.
Mixer mixer_of(const toast_mixer &is, const mx::array *const (&with)[STEPS_WITH], int batch) {
  check(is.heads > 0 && is.groups > 0 && is.heads % is.groups == 0 && is.numbers > 0,
        "heads of other sizes");
  for (auto one : with) check(!one || one->dtype() == mx::float32, "numbers that are no float32");
  const mx::array &weight = *with[CONVOLUTION];
  check(weight.ndim() == 3 && weight.shape(2) == 1 && weight.shape(1) > 0 &&
            weight.shape(1) <= MOST_KERNEL,
        "a convolution of another shape");
  const Mixer m = {is, weight.shape(0), weight.shape(1)};
  check(m.inner() > 0 && m.inner() % is.heads == 0, "a convolution of other channels");
  auto fits = [&](int i, const mx::Shape &shape) { return !with[i] || with[i]->shape() == shape; };
  const mx::Shape own = {is.heads}, rows = {batch, m.kernel - 1, m.channels};
  check(with[A_LOG] && with[D] && with[DT_BIAS] && fits(CONVOLUTION_BIAS, {m.channels}) &&
            fits(BEFORE, rows) && fits(A_LOG, own) && fits(D, own) && fits(DT_BIAS, own) &&
            fits(STATE, {batch, is.heads, m.inner() / is.heads, is.numbers}),
        "parameters or a state of another shape");
  return m;
}

// Of what it gives, the last rows that were convolved, and the state.
std::vector<mx::Shape> shapes_of(const Mixer &m, const mx::Shape &y) {
  return {y, {y[0], m.kernel - 1, m.channels},
          {y[0], m.is.heads, m.inner() / m.is.heads, m.is.numbers}};
}

// Objects as STEPS_WITH has them: y, the last rows that were convolved, the state after it.
Arrays mixed(void **objects, const toast_mixer &is) {
  Arrays inputs;
  const auto given = taken(objects, STEPS_WITH, inputs);
  const mx::array &projected = inputs[0];
  check(projected.ndim() == 3, "steps of another shape");
  const mx::array *with[STEPS_WITH];
  for (int i = 0; i < STEPS_WITH; i++) with[i] = array_if(objects[i]);
  const int batch = projected.shape(0), length = projected.shape(1);
  const Mixer m = mixer_of(is, with, batch);
  check(projected.shape(2) == m.all(), "steps of another shape");
  return made("ToastMixer", shapes_of(m, {batch, length, m.inner()}),
              {mx::float32, mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-3], last = arrays.end()[-2], after = arrays.back();
    const Floats at(arrays, given);
    mixer_steps(m, {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)}, batch, length,
                y.data<float>(), last.data<float>(), after.data<float>());
  }, place_of(given, STATE));
}

// A layer: its mixer's norm is that of values, its parts are those that project, at the first
// place, and out. Beside norms, where others have a rotation and a factor: the convolution's
// weight and bias, and then a_log, d and dt's bias.
enum { KERNEL = NORMS, KERNEL_BIAS, AFTER_FACTOR = FACTOR + 1 };

struct MixerLayer {
  Layer layer;
  Mixer mixer;
  Mixture mixture;
  bool biased, begun;
  size_t outputs;  // of x: one, or, with a network that is left to itself, the sum and its norm
};

// silu(gate) y of steps that are projected to gates and more, and its norm, in place: (count,
// inner). weight: of the norm, NULL for none.
void gate_steps(const MixerLayer &m, const float *projected, int64_t count, const float *weight,
                float *y) {
  const int64_t inner = m.mixer.inner(), all = m.mixer.all(), size = m.mixer.is.normed;
  std::unique_ptr<float[]> gates(new float[count * inner]);
  for (int64_t i = 0; i < count; i++) std::copy_n(projected + i * all, inner, &gates[i * inner]);
  need(toast_gate(gates.get(), y, count * inner, TOAST_F32, TOAST_SILU, y));
  if (!weight) return;
  const toast_vectors rows = {y, count * inner / size, size, TOAST_F32};
  const float eps = m.layer.is.eps[VALUE_NORM];
  const bool whole = size == inner;
  need(toast_rms_norm(&rows, size, whole ? weight : nullptr, TOAST_F32, whole ? 0 : 1, eps, y,
                      TOAST_F32));
  for (int64_t i = 0; !whole && i < count * inner; i++) y[i] *= weight[i % inner];
}

// arrays: x, what came before and the state, if it has begun, the norm of x, what projects, the
// convolution's, a_log, d, dt's bias, the mixer's norm, what lies behind, the mixture; what comes
// out, the rows for what follows, the state after it.
void compute(const MixerLayer &m, const Arrays &arrays) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, inner = m.mixer.inner();
  const Layer &layer = m.layer;
  mx::array after = arrays.back(), last = arrays.end()[-2], out = arrays.end()[-3];
  mx::array first = arrays.end()[-2 - int(m.outputs)];
  InOrder x(arrays[0]), before(arrays[m.begun]), state(arrays[2 * m.begun]);
  std::unique_ptr<float[]> memory(
      new float[count * (columns + m.mixer.all() + inner + columns)]);
  float *const normed = memory.get(), *const projected = normed + count * columns;
  float *const y = projected + count * m.mixer.all(), *const own = y + count * inner;
  size_t at = 1 + 2 * m.begun;
  if (layer.has[FIRST_NORM])
    apply_norm(layer, FIRST_NORM, arrays, at, x.floats(), count * columns, normed);
  const Part part(arrays, at, layer.packing[0], layer.biased[0]);
  const Vectors vectors = {
      {layer.has[FIRST_NORM] ? normed : x.floats(), count, columns, TOAST_F32}, count};
  multiply(layer.activation_bits, {{vectors, part, projected}});
  const float *with[STEPS_WITH] = {projected};
  std::vector<InOrder> floats;
  floats.reserve(STEPS_WITH);
  for (int i : {CONVOLUTION, CONVOLUTION_BIAS, A_LOG, D, DT_BIAS})
    if (i != CONVOLUTION_BIAS || m.biased) with[i] = floats.emplace_back(arrays[at++]).floats();
  if (m.begun) with[BEFORE] = before.floats(), with[STATE] = state.floats();
  mixer_steps(m.mixer, {with[0], with[1], with[2], with[3], with[4], with[5], with[6], with[7]},
              batch, length, y, last.data<float>(), after.data<float>());
  std::unique_ptr<InOrder> weight(layer.has[VALUE_NORM] ? new InOrder(arrays[at++]) : nullptr);
  gate_steps(m, projected, count, weight ? weight->floats() : nullptr, y);
  float *const to = out.data<float>();
  float *const sum = m.outputs == 2 ? first.data<float>() : is_all(layer) ? to : own;
  behind(layer, arrays, at, x.floats(), y, count, sum, to);
  if (m.mixture.choice.chosen) mix_behind(layer, m.mixture, arrays, at, sum, count, to);
}

// before, state: NULL for both where it has not begun.
Arrays mixer_layer(const mx::array &x, const mx::array *before, const mx::array *state,
                   const toast_layer &is, const toast_mixer &mixer, const toast_operands &given,
                   const toast_mixture *mixture) {
  check_rows(x);
  check(!before == !state, "a layer that has half begun");
  check(!is.centred && !is.parallel, "layer norms, which mixers have not");
  const int64_t columns = x.shape(2);
  MixerLayer m = {{is}, {}, {}, given.rest[KERNEL_BIAS] != nullptr, before != nullptr, 1};
  Layer &layer = m.layer;
  layer.activation_bits = given.activation_bits;
  Arrays inputs = {x};
  if (m.begun) inputs.push_back(*before), inputs.push_back(*state);
  const size_t first = inputs.size();
  void *const *more = given.rest + AFTER_FACTOR;
  const mx::array *with[STEPS_WITH] = {
      nullptr, &rest_of(given, KERNEL), array_if(given.rest[KERNEL_BIAS]), before,
      array_if(more[0]), array_if(more[1]), array_if(more[2]), state};
  m.mixer = mixer_of(mixer, with, x.shape(0));
  const int64_t inner = m.mixer.inner();
  check(mixer.normed ? mixer.normed > 0 && inner % mixer.normed == 0 : !given.rest[VALUE_NORM],
        "a norm of other numbers");
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  check(add_one(inputs, layer, 0, given, 0, columns) == m.mixer.all(), "steps of another shape");
  for (int i : {CONVOLUTION, CONVOLUTION_BIAS, A_LOG, D, DT_BIAS})
    if (with[i]) inputs.push_back(*with[i]);
  add_norm(inputs, layer, VALUE_NORM, given, inner, inner);
  check(!layer.has[VALUE_NORM] || inputs.back().dtype() == mx::float32, "a norm in 16 bits");
  add_behind(inputs, layer, given, inner);
  if (mixture) {
    m.mixture = add_mixture_behind(inputs, layer, given, *mixture);
  } else if (!is_all(layer) && !is.network) {
    m.outputs = 2;
  }
  const Weights weights = {first, inputs.size()};
  auto shapes = shapes_of(m.mixer, x.shape());
  if (m.outputs == 2) shapes.insert(shapes.begin(), x.shape());
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  return made("ToastMixerLayer", std::move(shapes), dtypes, std::move(inputs),
              [m](const Arrays &arrays) { compute(m, arrays); }, m.begun ? 2 : -1, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes y and what a mixer keeps, arrays that nobody else has, of objects as STEPS_WITH has them,
// NULL for what is not given. Lazy. Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_mixer_array(void *y, void *last, void *after, void **objects,
                                        const toast_mixer *is) {
  return toast::wrong([&] {
    auto made = toast::mixed(objects, *is);
    toast::array_of(y) = made[0];
    toast::array_of(last) = made[1];
    toast::array_of(after) = made[2];
  });
}

// Makes `outs`, arrays that nobody else has, what a layer gives of x, one, or two where there is a
// network that is left to itself, and what its mixer keeps. before, state: NULL for both where it
// has not begun. mixture: which is its network; NULL for none. Lazy. Returns as above.
TOAST_API const char *toast_mixer_layer_array(void **outs, void *x, void *before, void *state,
                                              const toast_operands *given,
                                              const toast_layer *layer, const toast_mixer *is,
                                              const toast_mixture *mixture) {
  using toast::array_if, toast::array_of;
  return toast::wrong([&] {
    auto made = toast::mixer_layer(array_of(x), array_if(before), array_if(state), *layer, *is,
                                   *given, mixture);
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
