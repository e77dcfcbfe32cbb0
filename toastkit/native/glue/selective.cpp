// A layer with Mamba's selective scan (arXiv 2312.00752) as one MLX primitive: a layer of the
// common form, with a scan in place of attention.
#include <cmath>

#include "../kernels/rows.h"
#include "recurrent.h"

namespace toast {
namespace {

// rank: columns of the projection of time steps. numbers: state size of a channel.
struct Selective {
  Layer layer;
  Ending ending;
  int inner, rank, numbers, kernel;
  bool biased, begun;
  int mixed() const { return rank + 2 * numbers; }  // columns of time steps, B and C
};

// The projections of a layer, in the order of its parts.
enum { IN, MIXED, STEPS };

// Time steps, B and C, (count, length) each, from the projected rows (count, mixed): normed where
// there are norms.
void split_steps(const Selective &s, const Arrays &arrays, size_t &at, const float *mixed,
                 int64_t count, float *const (&outs)[HEADS]) {
  const int lengths[HEADS] = {s.rank, s.numbers, s.numbers};
  for (int i = 0; i < HEADS; mixed += lengths[i++]) {
    if (s.layer.has[QUERY_NORM + i]) {
      apply_norm(s.layer, QUERY_NORM + i, arrays, at, mixed, count * lengths[i], outs[i],
                 s.mixed());
      continue;
    }
    for (int64_t k = 0; k < count; k++)
      std::copy_n(mixed + k * s.mixed(), lengths[i], outs[i] + k * lengths[i]);
  }
}

// arrays, in order: x; both states, if begun; input norm; input projection; the convolution's; the
// projection of time steps, B and C; their norms; the projection of time steps to channels; a_log;
// d; those of finish_layer; the mixture's. Outputs: those of the layer, both new states.
void compute(const Selective &s, const Arrays &arrays) {
  const Layer &layer = s.layer;
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, inner = s.inner;
  const int64_t kept = s.kernel - 1;
  mx::array after = arrays.back(), last = arrays.end()[-2];
  Contiguous x(arrays[0]), before(arrays[s.begun]), state(arrays[2 * s.begun]);
  std::unique_ptr<float[]> memory(
      new float[count * (columns + 5 * inner + 2 * (s.rank + 2 * s.numbers))]);
  float *const normed = memory.get(), *const projected = normed + count * columns;
  float *const u = projected + 2 * count * inner, *const dt = u + count * inner;
  float *const y = dt + count * inner, *const mixed = y + count * inner;
  float *const steps = mixed + count * s.mixed(), *const b = steps + count * s.rank;
  float *const c = b + count * s.numbers;
  auto multiply_by = [&](int i, size_t &at, const float *rows, int64_t numbers, float *out) {
    const Part part(arrays, at, layer.packing[i]);
    const Vectors vectors = {{rows, count, numbers, TOAST_F32}, count};
    toast::multiply(layer.activation_bits, {{vectors, part, out}});
  };
  size_t at = 1 + 2 * s.begun;
  const bool has_norm = layer.has[FIRST_NORM];
  if (has_norm) apply_norm(layer, FIRST_NORM, arrays, at, x.floats(), count * columns, normed);
  multiply_by(IN, at, has_norm ? normed : x.floats(), columns, projected);

  Contiguous weight(arrays[at++]);
  std::unique_ptr<Contiguous> bias(s.biased ? new Contiguous(arrays[at++]) : nullptr);
  const float *const earlier = s.begun ? before.floats() : nullptr;
  const toast_convolution convolution = {
      batch, length, inner, s.kernel, projected, {length * 2 * inner, 2 * inner}, earlier,
      {kept * inner, inner}, TOAST_F32, weight.data(), bias ? bias->data() : nullptr, TOAST_F32, 1,
      inner,
  };
  need(toast_convolve(&convolution, u, TOAST_F32));
  save_last_rows(projected, batch, length, 2 * inner, earlier, kept, inner, last.data<float>());

  multiply_by(MIXED, at, u, inner, mixed);
  split_steps(s, arrays, at, mixed, count, {steps, b, c});
  multiply_by(STEPS, at, steps, s.rank, dt);
  Contiguous a_log(arrays[at]), d(arrays[at + 1]);
  at += 2;
  const toast_scan scan = {
      batch, length, 1, inner, 1, s.numbers, u, b, c, dt, a_log.floats(), d.floats(), nullptr,
      0, INFINITY, 1, nullptr, s.begun ? state.floats() : nullptr,
  };
  need(toast_scan_steps(&scan, y, after.data<float>()));
  for (int64_t i = 0; i < count; i++)  // gates, where time steps were
    std::copy_n(projected + (2 * i + 1) * inner, inner, dt + i * inner);
  need(toast_gate(dt, y, count * inner, TOAST_F32, TOAST_SILU, y));
  end_layer(layer, s.ending, arrays, at, x.floats(), y, count,
            arrays.size() - 2 - s.ending.outputs);
}

// before: states of the convolution and the scan; both NULL at the start of a sequence.
Arrays selective(const mx::array &x, void **before, const toast_layer &is,
                 const toast_operands &given, const toast_mixture *mixture) {
  check(!is.layer_norms && !is.parallel, "layer norms, which such layers have not");
  const mx::array &weight = rest_of(given, KERNEL), &a_log = rest_of(given, BEHIND_FACTOR);
  const mx::array &d = rest_of(given, BEHIND_FACTOR + 1);
  check(weight.ndim() == 3 && weight.shape(2) == 1 && weight.shape(1) > 1 &&
            weight.shape(1) <= MAX_KERNEL && a_log.ndim() == 2,
        "a convolution or a scan of another shape");
  const int inner = weight.shape(0), kernel = weight.shape(1), numbers = a_log.shape(1);
  Selective s = {{is}, {}, inner, 0, numbers, kernel, given.rest[KERNEL_BIAS] != nullptr,
                 before[0] != nullptr};
  Layer &layer = s.layer;
  const int64_t columns = x.shape(-1);
  const int batch = x.shape(0);
  const std::vector<mx::Shape> states = {{batch, kernel - 1, inner}, {batch, inner, numbers}};
  Arrays inputs = begin_layer(x, before, states);
  layer.activation_bits = given.activation_bits;
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  check(add_layer_part(inputs, layer, IN, given, IN, columns) == 2 * inner,
        "channels of another convolution");
  Arrays own = {weight, a_log, d};
  if (s.biased) own.push_back(rest_of(given, KERNEL_BIAS));
  check_floats(own);
  check(inner > 0 && numbers > 0 && a_log.shape(0) == inner && d.shape() == mx::Shape{inner} &&
            (!s.biased || own.back().shape() == mx::Shape{inner}),
        "parameters of other channels");
  inputs.push_back(weight);
  if (s.biased) inputs.push_back(own.back());
  s.rank = add_layer_part(inputs, layer, MIXED, given, MIXED, inner) - 2 * numbers;
  check(s.rank > 0, "time steps of another shape");
  for (int i = 0; i < HEADS; i++) {
    const int size = i ? numbers : s.rank;
    add_norm(inputs, layer, QUERY_NORM + i, given, size, size);
  }
  check(add_layer_part(inputs, layer, STEPS, given, STEPS, s.rank) == inner,
        "time steps of other channels");
  inputs.push_back(a_log), inputs.push_back(d);
  s.ending = add_ending(inputs, layer, given, inner, mixture);
  return lazy_layer("ToastSelective", std::move(inputs), states, s.ending, s.begun,
                    [s](const Arrays &arrays) { compute(s, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer (one array; two, the sum and its norm, if
// its network is computed elsewhere) and its new states. Parts: input projection; that of time
// steps, B and C, which are normed as queries, keys and values are; that of time steps to channels;
// output projection. before, state: NULL for both at the start of a sequence. mixture: its network,
// or NULL. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_selective_array(void **outs, void *x, void *before, void *state,
                                            const toast_operands *given, const toast_layer *layer,
                                            const void *, const toast_mixture *mixture) {
  void *states[] = {before, state};
  return set_arrays(outs, [&] {
    return toast::selective(array_of(x), states, *layer, *given, mixture);
  });
}

}  // extern "C"
