// A layer with a gated short convolution (LFM2) as one MLX primitive: a layer of the common form,
// with gates b and c and values v in place of queries, keys and values.
#include "../kernels/rows.h"
#include "recurrent.h"

namespace toast {
namespace {

struct ShortConv {
  Layer layer;
  Ending ending;
  int64_t kernel;
  bool biased, begun;
};

// v = c * convolution(b * v). last: the convolution's new state, the last rows of b * v.
void convolve(const ShortConv &s, const Arrays &arrays, size_t &at, const float *b, const float *c,
              float *v, int64_t batch, int64_t length, int64_t columns, float *last) {
  const int64_t count = batch * length * columns, kept = (s.kernel - 1) * columns;
  Contiguous weight(arrays[at++]);
  std::unique_ptr<Contiguous> bias(s.biased ? new Contiguous(arrays[at++]) : nullptr);
  Contiguous before(arrays[s.begun]);
  const float *earlier = s.begun ? before.floats() : nullptr;
  std::unique_ptr<float[]> gated(new float[count]);
  for (int64_t i = 0; i < count; i++) gated[i] = b[i] * v[i];
  const toast_convolution convolution = {
      batch, length, columns, s.kernel, gated.get(), {length * columns, columns}, earlier,
      {kept, columns}, TOAST_F32, weight.data(), bias ? bias->data() : nullptr, TOAST_F32, 0,
      columns,
  };
  need(toast_convolve(&convolution, v, TOAST_F32));
  for (int64_t i = 0; i < count; i++) v[i] = c[i] * v[i];
  save_last_rows(gated.get(), batch, length, columns, earlier, s.kernel - 1, columns, last);
}

// arrays, in order: x; the convolution's state, if begun; those of project_heads; the
// convolution's; those of finish_layer; the mixture's. Outputs: those of the layer, the new state.
void compute(const ShortConv &s, const Arrays &arrays) {
  const mx::array &x = arrays[0];
  const int64_t batch = x.shape(0), length = x.shape(1), columns = x.shape(2);
  const int64_t count = batch * length, all = count * columns;
  mx::array last = arrays.back();
  Contiguous contiguous(x);
  const float *rows = contiguous.floats();
  std::unique_ptr<float[]> memory(new float[3 * all]);
  float *const b = memory.get(), *const c = b + all, *const v = c + all;
  size_t at = 1 + s.begun;
  project_heads(s.layer, arrays, at, rows, count, {b, c, v});
  convolve(s, arrays, at, b, c, v, batch, length, columns, last.data<float>());
  end_layer(s.layer, s.ending, arrays, at, rows, v, count, arrays.size() - 1 - s.ending.outputs);
}

Arrays short_conv(const mx::array &x, void **before, const toast_layer &is,
                  const toast_operands &given, const toast_mixture *mixture) {
  ShortConv s = {{is}, {}, 0, given.rest[KERNEL_BIAS] != nullptr, before[0] != nullptr};
  const int columns = x.shape(-1);
  check(is.heads == 1 && is.key_heads == 1 && is.fused_head == columns && !is.shares_cache &&
            !is.layer_input,
        "gates of another size");
  const mx::array &weight = rest_of(given, KERNEL);
  s.kernel = weight.ndim() == 3 ? weight.shape(1) : 0;
  check(s.kernel > 1 && s.kernel <= MAX_KERNEL && weight.dtype() == mx::float32 &&
            weight.shape() == mx::Shape{columns, int(s.kernel), 1},
        "a convolution of another shape");
  const std::vector<mx::Shape> states = {{x.shape(0), int(s.kernel) - 1, columns}};
  Arrays inputs = begin_layer(x, before, states);
  add_head_projections(inputs, s.layer, given);
  inputs.push_back(weight);
  if (s.biased) {
    const mx::array &bias = rest_of(given, KERNEL_BIAS);
    check(bias.shape() == mx::Shape{columns} && bias.dtype() == mx::float32,
          "a bias of another shape");
    inputs.push_back(bias);
  }
  s.ending = add_ending(inputs, s.layer, given, columns, mixture);
  return lazy_layer("ToastShortConv", std::move(inputs), states, s.ending, s.begun,
                    [s](const Arrays &arrays) { compute(s, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer (one array; two, the sum and its norm, if
// its network is computed elsewhere) and its convolution's new state. before: the state; NULL for
// zeros. mixture: its network, or NULL. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_short_conv_array(void **outs, void *x, void *before,
                                             const toast_operands *given, const toast_layer *layer,
                                             const void *, const toast_mixture *mixture) {
  return set_arrays(outs, [&] {
    return toast::short_conv(array_of(x), &before, *layer, *given, mixture);
  });
}

}  // extern "C"
