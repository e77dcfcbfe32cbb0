// A layer with linear attention whose states decay head by head (Lightning Attention, arXiv
// 2401.04658) as one MLX primitive: a layer of the common form, with Mamba-2's scan in time steps
// of 1 in place of attention. Values are its x, keys its B, queries its C.
#include <cmath>

#include "../kernels/rows.h"
#include "recurrent.h"

extern "C" {

// position: of the first token. normed: group size of the norm of the scan's output.
typedef struct {
  int32_t position, normed;
} toast_linear_attention;

}  // extern "C"

namespace toast {
namespace {

struct LinearAttention {
  Layer layer;
  toast_linear_attention is;
  Ending ending;
  bool begun;
  int64_t inner() const { return int64_t(layer.is.heads) * layer.size[0]; }
};

// RoPE of x (count, heads, size), the positions of rows of a batch one after another.
void turn(const LinearAttention &l, const float *frequencies, const float *x, int64_t count,
          int64_t length, float *out) {
  std::vector<int32_t> positions(count);
  for (int64_t i = 0; i < count; i++) positions[i] = int32_t(l.is.position + i % length);
  const int64_t size = l.layer.size[0];
  const toast_heads heads = {x, count, l.layer.is.heads, 1, size, {l.inner(), size, size},
                             TOAST_F32};
  const auto rotation = rotation_of(l.layer.is, frequencies, positions.data(), count);
  need(toast_rotate(&heads, &rotation, out));
}

// arrays, in order: x; the state, if begun; those of project_heads; RoPE frequencies; logarithms of
// decays; the norm's weight; those of finish_layer; the mixture's. Outputs: those of the layer, the
// new state.
void compute(const LinearAttention &l, const Arrays &arrays) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1), count = batch * length;
  const int64_t heads = l.layer.is.heads, size = l.layer.size[0], all = count * l.inner();
  mx::array after = arrays.back();
  Contiguous x(arrays[0]), state(arrays[l.begun]);
  std::unique_ptr<float[]> memory(new float[7 * all + count * heads + 2 * heads]);
  float *const q = memory.get(), *const k = q + all, *const v = k + all, *const gates = v + all;
  float *const b = gates + all, *const c = b + all, *const y = c + all, *const steps = y + all;
  float *const a_log = steps + count * heads, *const zeros = a_log + heads;
  size_t at = 1 + l.begun;
  project_heads(l.layer, arrays, at, x.floats(), count, {q, k, v}, gates);
  Contiguous frequencies(arrays[at]), decays(arrays[at + 1]), weight(arrays[at + 2]);
  at += 3;
  turn(l, frequencies.floats(), q, count, length, c);
  turn(l, frequencies.floats(), k, count, length, b);
  for (int64_t i = 0; i < all; i++) c[i] *= l.layer.is.scale;
  for (int64_t h = 0; h < heads; h++) a_log[h] = std::log(-decays.floats()[h]);
  std::fill_n(steps, count * heads, 0.f), std::fill_n(zeros, heads, 0.f);
  const toast_scan scan = {
      batch, length, heads, size, heads, size, v, b, c, steps, a_log, zeros, zeros, 1, 1, 0,
      nullptr, l.begun ? state.floats() : nullptr,
  };
  need(toast_scan_steps(&scan, y, after.data<float>()));
  const toast_vectors rows = {y, all / l.is.normed, l.is.normed, TOAST_F32};
  need(toast_rms_norm(&rows, l.is.normed, nullptr, TOAST_F32, 1, l.layer.is.eps[VALUE_NORM], y,
                      TOAST_F32));
  for (int64_t i = 0; i < all; i++) y[i] *= weight.floats()[i % l.inner()];
  need(toast_gate(gates, y, all, TOAST_F32, TOAST_SIGMOID, y));
  end_layer(l.layer, l.ending, arrays, at, x.floats(), y, count,
            arrays.size() - 1 - l.ending.outputs);
}

Arrays linear_attention(const mx::array &x, void **before, const toast_layer &is,
                        const toast_linear_attention &attention, const toast_operands &given,
                        const toast_mixture *mixture) {
  check(is.fused_head && !is.grouped && is.gated == 2 && is.heads == is.key_heads &&
            !is.shares_cache && !is.layer_norms && !is.norm_after_rope && !is.layer_input &&
            !given.rest[VALUE_NORM],
        "a layer of another form");
  LinearAttention l = {{is}, attention, {}, before[0] != nullptr};
  const std::vector<mx::Shape> states = {{x.shape(0), is.heads, is.fused_head, is.fused_head}};
  Arrays inputs = begin_layer(x, before, states);
  add_head_projections(inputs, l.layer, given);
  check(attention.normed > 0 && l.inner() % attention.normed == 0, "a norm of other numbers");
  add_rotation(inputs, l.layer, given, l.layer.size[0]);
  const mx::array &decays = rest_of(given, BEHIND_FACTOR);
  const mx::array &weight = rest_of(given, BEHIND_FACTOR + 1);
  check_floats({decays, weight});
  check(decays.shape() == mx::Shape{is.heads} && weight.shape() == mx::Shape{int(l.inner())},
        "decays or weights of other heads");
  inputs.push_back(decays), inputs.push_back(weight);
  l.ending = add_ending(inputs, l.layer, given, l.inner(), mixture);
  return lazy_layer("ToastLinearAttention", std::move(inputs), states, l.ending, l.begun,
                    [l](const Arrays &arrays) { compute(l, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer (one array; two, the sum and its norm, if
// its network is computed elsewhere) and its new state, (B, heads, values, keys). before: the
// state; NULL for zeros. mixture: its network, or NULL. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_linear_attention_array(void **outs, void *x, void *before,
                                                   const toast_operands *given,
                                                   const toast_layer *layer,
                                                   const toast_linear_attention *is,
                                                   const toast_mixture *mixture) {
  return set_arrays(outs, [&] {
    return toast::linear_attention(array_of(x), &before, *layer, *is, *given, mixture);
  });
}

}  // extern "C"
