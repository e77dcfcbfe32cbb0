// Mamba-2 mixers (kernels/recurrent.h) as MLX primitives: between their projections, and as whole
// layers of the common form in place of attention.
#include "recurrent.h"

extern "C" {

// Constants of a mixer. numbers: state size of a channel. normed: group size of the norm of y, 0
// without a norm. least, most: limits of a time step.
typedef struct {
  int32_t heads, groups, numbers, normed;
  float least, most;
} toast_mixer;

}  // extern "C"

namespace toast {
namespace {

// channels: that are convolved: x, and B and C of each group.
struct Mixer {
  toast_mixer is;
  int channels, kernel;
  int inner() const { return channels - 2 * is.groups * is.numbers; }
  int all() const { return inner() + channels + is.heads; }
};

// Arrays of a mixer: the input projection's output, the convolution's weight, bias and state,
// a_log, d, dt's bias, the scan's state.
enum { PROJECTED, CONVOLUTION, CONVOLUTION_BIAS, BEFORE, A_LOG, D, DT_BIAS, STATE, STEPS_WITH };

// Convolution and scan of all steps. A projected row is (gates of y, which are not read here;
// convolved channels; dt). last: the convolution's new state; after: the scan's.
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
  save_last_rows(projected + inner, batch, length, all, with[BEFORE], rows, m.channels, last);
}

// The mixer that has these arrays, NULL where absent. Throws std::invalid_argument if they do not
// fit together.
Mixer mixer_of(const toast_mixer &is, const mx::array *const (&with)[STEPS_WITH], int batch) {
  check(is.heads > 0 && is.groups > 0 && is.heads % is.groups == 0 && is.numbers > 0,
        "heads of other sizes");
  for (auto one : with) check(!one || one->dtype() == mx::float32, "numbers that are no float32");
  const mx::array &weight = *with[CONVOLUTION];
  check(weight.ndim() == 3 && weight.shape(2) == 1 && weight.shape(1) > 0 &&
            weight.shape(1) <= MAX_KERNEL,
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

// Shapes of the states of the convolution and of the scan.
std::vector<mx::Shape> states_of(const Mixer &m, int batch) {
  return {{batch, m.kernel - 1, m.channels},
          {batch, m.is.heads, m.inner() / m.is.heads, m.is.numbers}};
}

// objects: in the order of STEPS_WITH. Returns y and both new states.
Arrays mixed(void **objects, const toast_mixer &is) {
  Arrays inputs;
  const auto given = collect_inputs(objects, STEPS_WITH, inputs);
  const mx::array &projected = inputs[0];
  check(projected.ndim() == 3, "steps of another shape");
  const mx::array *with[STEPS_WITH];
  for (int i = 0; i < STEPS_WITH; i++) with[i] = array_if(objects[i]);
  const int batch = projected.shape(0), length = projected.shape(1);
  const Mixer m = mixer_of(is, with, batch);
  check(projected.shape(2) == m.all(), "steps of another shape");
  auto shapes = states_of(m, batch);
  shapes.insert(shapes.begin(), {batch, length, m.inner()});
  return lazy("ToastMixer", std::move(shapes), {mx::float32, mx::float32, mx::float32},
              std::move(inputs), [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-3], last = arrays.end()[-2], after = arrays.back();
    const OptionalFloats at(arrays, given);
    mixer_steps(m, {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)}, batch, length,
                y.data<float>(), last.data<float>(), after.data<float>());
  }, input_index(given, STATE));
}

// A layer whose part 0 is the input projection; VALUE_NORM is the mixer's norm. From BEHIND_FACTOR
// on there are a_log, d and dt's bias.
struct MixerLayer {
  Layer layer;
  Mixer mixer;
  Ending ending;
  bool biased, begun;
};

// y = norm(silu(gate) * y), (count, inner), with gates from the projected rows. weight: of the
// norm; NULL without one.
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

// arrays, in order: x; both states, if begun; input norm; input projection; the convolution's;
// a_log, d, dt's bias; the mixer's norm; those of finish_layer; the mixture's. Outputs: those of
// the layer, both new states.
void compute(const MixerLayer &m, const Arrays &arrays) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, inner = m.mixer.inner();
  const Layer &layer = m.layer;
  mx::array after = arrays.back(), last = arrays.end()[-2];
  Contiguous x(arrays[0]), before(arrays[m.begun]), state(arrays[2 * m.begun]);
  std::unique_ptr<float[]> memory(new float[count * (columns + m.mixer.all() + inner)]);
  float *const normed = memory.get(), *const projected = normed + count * columns;
  float *const y = projected + count * m.mixer.all();
  size_t at = 1 + 2 * m.begun;
  if (layer.has[FIRST_NORM])
    apply_norm(layer, FIRST_NORM, arrays, at, x.floats(), count * columns, normed);
  const Part part(arrays, at, layer.packing[0]);
  const Vectors vectors = {
      {layer.has[FIRST_NORM] ? normed : x.floats(), count, columns, TOAST_F32}, count};
  multiply(layer.activation_bits, {{vectors, part, projected}});
  const float *with[STEPS_WITH] = {projected};
  std::vector<Contiguous> floats;
  floats.reserve(STEPS_WITH);
  for (int i : {CONVOLUTION, CONVOLUTION_BIAS, A_LOG, D, DT_BIAS})
    if (i != CONVOLUTION_BIAS || m.biased) with[i] = floats.emplace_back(arrays[at++]).floats();
  if (m.begun) with[BEFORE] = before.floats(), with[STATE] = state.floats();
  mixer_steps(m.mixer, {with[0], with[1], with[2], with[3], with[4], with[5], with[6], with[7]},
              batch, length, y, last.data<float>(), after.data<float>());
  std::unique_ptr<Contiguous> weight(layer.has[VALUE_NORM] ? new Contiguous(arrays[at++])
                                                           : nullptr);
  gate_steps(m, projected, count, weight ? weight->floats() : nullptr, y);
  end_layer(layer, m.ending, arrays, at, x.floats(), y, count,
            arrays.size() - 2 - m.ending.outputs);
}

// before: states of the convolution and the scan; both NULL at the start of a sequence.
Arrays mixer_layer(const mx::array &x, void **before, const toast_layer &is,
                   const toast_mixer &mixer, const toast_operands &given,
                   const toast_mixture *mixture) {
  check(!is.layer_norms && !is.parallel, "layer norms, which mixers have not");
  const int64_t columns = x.shape(-1);
  MixerLayer m = {{is}, {}, {}, given.rest[KERNEL_BIAS] != nullptr, before[0] != nullptr};
  Layer &layer = m.layer;
  void *const *more = given.rest + BEHIND_FACTOR;
  const mx::array *with[STEPS_WITH] = {
      nullptr, &rest_of(given, KERNEL), array_if(given.rest[KERNEL_BIAS]), nullptr,
      array_if(more[0]), array_if(more[1]), array_if(more[2]), nullptr};
  m.mixer = mixer_of(mixer, with, x.shape(0));
  const auto states = states_of(m.mixer, x.shape(0));
  Arrays inputs = begin_layer(x, before, states);
  const int64_t inner = m.mixer.inner();
  check(mixer.normed ? mixer.normed > 0 && inner % mixer.normed == 0 : !given.rest[VALUE_NORM],
        "a norm of other numbers");
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  check(add_layer_part(inputs, layer, 0, given, 0, columns) == m.mixer.all(),
        "steps of another shape");
  for (int i : {CONVOLUTION, CONVOLUTION_BIAS, A_LOG, D, DT_BIAS})
    if (with[i]) inputs.push_back(*with[i]);
  add_norm(inputs, layer, VALUE_NORM, given, inner, inner);
  check(!layer.has[VALUE_NORM] || inputs.back().dtype() == mx::float32, "a norm in 16 bits");
  m.ending = add_ending(inputs, layer, given, inner, mixture);
  return lazy_layer("ToastMixerLayer", std::move(inputs), states, m.ending, m.begun,
                    [m](const Arrays &arrays) { compute(m, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a mixer and its new states. objects: in
// the order of STEPS_WITH, NULL where absent. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_mixer_array(void **outs, void **objects, const toast_mixer *is) {
  return set_arrays(outs, [&] { return toast::mixed(objects, *is); });
}

// Sets `outs`, unshared arrays, to the output of a layer (one array; two, the sum and its norm, if
// its network is computed elsewhere) and its mixer's new states. before, state: NULL for both at
// the start of a sequence. mixture: its network, or NULL. Lazy. Returns as above.
TOAST_API const char *toast_mixer_layer_array(void **outs, void *x, void *before, void *state,
                                              const toast_operands *given,
                                              const toast_layer *layer, const toast_mixer *is,
                                              const toast_mixture *mixture) {
  void *states[] = {before, state};
  return set_arrays(outs, [&] {
    return toast::mixer_layer(array_of(x), states, *layer, *is, *given, mixture);
  });
}

}  // extern "C"
