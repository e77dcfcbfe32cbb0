// The row-wise functions of kernels/rows.h as MLX primitives.
#include "../kernels/rows.h"

#include "arrays.h"
#include "mixture.h"
#include "mlx/dtype.h"

namespace toast {
namespace {

toast_vectors rows_of(const mx::array &x, const Contiguous &data) {
  const int64_t columns = x.shape(-1);
  return {data.data(), int64_t(x.size()) / columns, columns, type_of(x)};
}

// RMS norm, or layer norm if `centred`. No weight: ones. bias: only with a weight, of its dtype.
mx::array norm(const mx::array &x, const mx::array *weight, const mx::array *bias, bool centred,
               float plus, float eps) {
  const mx::Shape own = {x.ndim() ? x.shape(-1) : 0};
  check(x.ndim() && (!weight || weight->shape() == own), "a weight of another length");
  check(!bias || (weight && bias->shape() == own && bias->dtype() == weight->dtype()),
        "a bias that is not as the weight is");
  auto dtype = weight ? mx::promote_types(x.dtype(), weight->dtype()) : x.dtype();
  type_of(x);
  Arrays inputs = {x};
  if (weight) type_of(*weight), inputs.push_back(*weight);
  if (bias) inputs.push_back(*bias);
  return lazy("ToastNorm", x.shape(), dtype, std::move(inputs), [=](const Arrays &arrays) {
    const bool weighted = arrays.size() > 2, biased = arrays.size() > 3;
    mx::array out = arrays.back();
    Contiguous data(arrays[0]), weights(arrays[weighted]), biases(arrays[2 * biased]);
    const toast_vectors rows = rows_of(arrays[0], data);
    const void *by = weighted ? weights.data() : nullptr, *and_ = biased ? biases.data() : nullptr;
    const int type = type_of(arrays[weighted]), to = type_of(out);
    char *y = out.data<char>();
    need(centred ? toast_layer_norm(&rows, rows.stride, by, and_, type, eps, y, to)
                 : toast_rms_norm(&rows, rows.stride, by, type, plus, eps, y, to));
  });
}

// Constants of a RoPE. offset: position of the first token if no array of offsets is given.
struct RopeOptions {
  int dims, traditional, inverse, offset;
  float scale, factor;
};

void rotate(const RopeOptions &how, const Arrays &arrays) {
  const mx::array &x = arrays[0];
  mx::array out = arrays.back();
  const int axes = int(x.ndim());
  const Rows rows(x);
  const toast_heads heads = {
      rows.data(), x.shape(0), axes == 4 ? x.shape(1) : 1, x.shape(-2), x.shape(-1),
      {rows.stride(0), axes == 4 ? rows.stride(1) : 0, rows.stride(axes - 2)}, type_of(x)};
  Contiguous frequencies(arrays[1]), offsets(arrays[arrays.size() > 3 ? 2 : 1]);
  const bool given = arrays.size() > 3;
  const toast_rotation rotation = {
      how.dims,
      frequencies.floats(),
      how.inverse,
      given ? reinterpret_cast<const int32_t *>(offsets.data()) : &how.offset,
      given ? int64_t(arrays[2].size()) : 1,
      how.scale,
      how.factor,
      how.traditional,
  };
  need(toast_rotate(&heads, &rotation, out.data<char>()));
}

mx::array rotated(const mx::array &x, const mx::array &frequencies, const mx::array *offsets,
                  const RopeOptions &how) {
  check(x.ndim() == 3 || x.ndim() == 4, "heads of another shape");
  check(how.dims > 0 && how.dims % 2 == 0 && how.dims <= x.shape(-1), "so many numbers of a head");
  check(frequencies.dtype() == mx::float32 && frequencies.shape() == mx::Shape{how.dims / 2},
        "frequencies of another shape");
  type_of(x);
  Arrays inputs = {x, frequencies};
  if (offsets) {
    check(offsets->dtype() == mx::int32 && offsets->ndim() <= 1 &&
              (offsets->size() == 1 || int(offsets->size()) == x.shape(0)),
          "offsets of another shape");
    inputs.push_back(*offsets);
  }
  return lazy("ToastRope", x.shape(), x.dtype(), std::move(inputs),
              [how](const Arrays &arrays) { rotate(how, arrays); });
}

mx::array gated(const mx::array &gate, const mx::array *x, int activation) {
  check(!x || (gate.shape() == x->shape() && gate.dtype() == x->dtype()),
        "a gate of another shape");
  type_of(gate);
  Arrays inputs = {gate};
  if (x) inputs.push_back(*x);
  return lazy("ToastGate", gate.shape(), gate.dtype(), std::move(inputs),
              [=](const Arrays &arrays) {
    const bool given = arrays.size() > 2;
    mx::array out = arrays.back();
    Contiguous gates(arrays[0]), data(arrays[given]);
    need(toast_gate(gates.data(), given ? data.data() : nullptr, out.size(), type_of(out),
                    activation, out.data<char>()));
  });
}

mx::array softmax(const mx::array &x) {
  check(x.ndim() >= 1, "no rows");
  type_of(x);
  return lazy("ToastSoftmax", x.shape(), x.dtype(), {x}, [](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_softmax(&rows, rows.stride, out.data<char>(), type_of(out)));
  });
}

// A reduction of each row to `count` float32 numbers.
mx::array summed(const char *name, const mx::array &x, int count,
                 decltype(toast_log_sum_exp) *compute) {
  check(x.ndim() >= 1 && x.shape(-1), "no rows");
  type_of(x);
  auto shape = x.shape();
  shape.back() = count;
  return lazy(name, std::move(shape), mx::float32, {x}, [=](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(compute(&rows, rows.stride, out.data<float>()));
  });
}

mx::array largest(const mx::array &x) {
  check(x.ndim() >= 1 && x.shape(-1), "no rows");
  type_of(x);
  auto shape = x.shape();
  shape.pop_back();
  return lazy("ToastLargest", std::move(shape), mx::uint32, {x}, [](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_largest(&rows, rows.stride, out.data<uint32_t>()));
  });
}

mx::array partitioned(const mx::array &x, int kth) {
  check(x.ndim() >= 1 && kth >= 0 && kth < x.shape(-1), "no such place in rows");
  type_of(x);
  return lazy("ToastPartition", x.shape(), mx::uint32, {x}, [=](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_partition(&rows, rows.stride, kth, out.data<uint32_t>()));
  });
}

// Rows of an 8-bit KV cache: int8, each followed by its float32 scale.
mx::array quantised(const mx::array &x) {
  check(x.ndim() >= 1 && x.shape(-1), "no rows");
  type_of(x);
  auto shape = x.shape();
  shape.back() += int(sizeof(float));
  return lazy("ToastQuantise", std::move(shape), mx::int8, {x}, [](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_quantise(&rows, rows.stride, out.data<char>()));
  });
}

// The float32 numbers of such rows.
mx::array dequantised(const mx::array &rows) {
  constexpr int SCALE = sizeof(float);
  check(rows.ndim() >= 1 && rows.shape(-1) > SCALE && rows.dtype() == mx::int8, "no such rows");
  auto shape = rows.shape();
  shape.back() -= SCALE;
  return lazy("ToastDequantise", std::move(shape), mx::float32, {rows}, [](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]);
    const int64_t columns = out.shape(-1);
    need(toast_dequantise(data.data(), int64_t(out.size()) / columns, columns,
                          out.data<float>()));
  });
}

mx::array weighed(const mx::array &x, const mx::array &weights) {
  auto shape = x.shape();
  check(x.ndim() >= 2 && shape[x.ndim() - 2], "no groups of vectors");
  const int columns = shape.back();
  shape.pop_back();
  check(weights.shape() == shape && weights.dtype() == mx::float32, "weights of another shape");
  const int64_t group = shape.back();
  shape.back() = columns;
  type_of(x);
  return lazy("ToastWeightedSum", std::move(shape), mx::float32, {x, weights},
              [=](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]), factors(arrays[1]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_weighted_sums(&rows, columns, group,
                             factors.floats(), out.data<char>(),
                             type_of(out)));
  });
}

// Indices of the k experts chosen for each row, and their weights.
Arrays routed(const mx::array &x, const mx::array *bias, const toast_choice &choice) {
  const int k = choice.chosen;
  check(x.ndim() >= 1 && k > 0 && k <= x.shape(-1), "no rows, or too few numbers in them");
  check(type_of(x) == TOAST_F32 || !(choice.how & TOAST_CHOSEN), "numbers that are no float32");
  check_choice(choice, bias, x.shape(-1));
  auto shape = x.shape();
  shape.back() = k;
  Arrays inputs = {x};
  if (bias) inputs.push_back(*bias);
  return lazy("ToastRoute", {shape, shape}, {mx::uint32, mx::float32}, std::move(inputs),
              [choice, biased = bias != nullptr](const Arrays &arrays) {
    mx::array which = arrays[arrays.size() - 2], shares = arrays.back();
    Contiguous data(arrays[0]), added(arrays[biased ? 1 : 0]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_route(&rows, rows.stride, &choice,
                     biased ? added.floats() : nullptr,
                     which.data<uint32_t>(), shares.data<float>()));
  });
}

// Weighted sums plus a gated vector. inputs: x (..., k, n), weights (..., k), vector (..., n), its
// gate (..., 1).
mx::array blended(const Arrays &inputs) {
  const mx::array &x = inputs[0];
  check(x.ndim() >= 2 && x.shape(-2) > 0 && x.shape(-1) > 0, "no groups of vectors");
  auto weights = x.shape(), more = x.shape(), gates = x.shape();
  weights.pop_back();
  more.erase(more.end() - 2);
  gates = more, gates.back() = 1;
  check(inputs[1].shape() == weights && inputs[2].shape() == more && inputs[3].shape() == gates,
        "weights, vectors or gates of another shape");
  for (auto &one : inputs) check(one.dtype() == mx::float32, "numbers that are no float32");
  const int64_t group = x.shape(-2);
  return lazy("ToastBlend", more, mx::float32, inputs, [=](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous data(arrays[0]), factors(arrays[1]), others(arrays[2]), gates(arrays[3]);
    const toast_vectors rows = rows_of(arrays[0], data);
    need(toast_blend(&rows, rows.stride, group, factors.floats(), others.floats(), gates.floats(),
                     out.data<float>()));
  });
}

// Causal depthwise convolution. The first kernel - 1 rows of x are the state: they have no output.
mx::array convolved(const mx::array &x, const mx::array &weight, const mx::array *bias, int silu) {
  check(x.ndim() == 3 && weight.ndim() == 3 && weight.shape(0) == x.shape(2) &&
            weight.shape(2) == 1 && x.shape(1) >= weight.shape(1) && weight.shape(1) > 0 &&
            weight.shape(1) <= MAX_KERNEL,
        "a convolution of another shape");
  check(!bias || (bias->shape() == mx::Shape{x.shape(2)} && bias->dtype() == weight.dtype()),
        "biases of another shape");
  type_of(x), type_of(weight);
  const int kept = weight.shape(1) - 1;
  Arrays inputs = {x, weight};
  if (bias) inputs.push_back(*bias);
  return lazy("ToastConvolution", {x.shape(0), x.shape(1) - kept, x.shape(2)}, x.dtype(),
              std::move(inputs), [=](const Arrays &arrays) {
    const mx::array &x = arrays[0];
    mx::array out = arrays.back();
    Contiguous data(x), weights(arrays[1]), biases(arrays[arrays.size() > 3 ? 2 : 1]);
    const int64_t channels = x.shape(2), all = channels * x.shape(1);
    const toast_convolution c = {
        x.shape(0), out.shape(1), channels, kept + 1,
        data.data() + kept * channels * x.itemsize(), {all, channels},
        data.data(), {all, channels}, type_of(x), weights.data(),
        arrays.size() > 3 ? biases.data() : nullptr, type_of(arrays[1]), silu, channels,
    };
    need(toast_convolve(&c, out.data<char>(), type_of(out)));
  });
}

}  // namespace
}  // namespace toast

// Each sets its first argument, unshared arrays, to what the function of kernels/rows.h computes.
// Lazy. Absent objects are NULL. Returns an error message or NULL.
extern "C" {

TOAST_API const char *toast_norm_array(void *out, void *x, void *weight, void *bias, int centred,
                                       float plus, float eps) {
  return set_array(out, [&] {
    return toast::norm(array_of(x), array_if(weight), array_if(bias), centred, plus, eps);
  });
}

TOAST_API const char *toast_rotate_array(void *out, void *x, void *frequencies, void *offsets,
                                         int offset, int dims, int traditional, int inverse,
                                         float scale, float factor) {
  return set_array(out, [&] {
    return toast::rotated(array_of(x), array_of(frequencies), array_if(offsets),
                          {dims, traditional, inverse, offset, scale, factor});
  });
}

TOAST_API const char *toast_gate_array(void *out, void *gate, void *x, int activation) {
  return set_array(out, [&] { return toast::gated(array_of(gate), array_if(x), activation); });
}

TOAST_API const char *toast_convolve_array(void *out, void *x, void *weight, void *bias, int silu) {
  return set_array(
      out, [&] { return toast::convolved(array_of(x), array_of(weight), array_if(bias), silu); });
}

TOAST_API const char *toast_softmax_array(void *out, void *x) {
  return set_array(out, [&] { return toast::softmax(array_of(x)); });
}

TOAST_API const char *toast_log_sum_exp_array(void *out, void *x) {
  return set_array(out, [&] {
    return toast::summed("ToastLogSumExp", array_of(x), 1, toast_log_sum_exp);
  });
}

TOAST_API const char *toast_distribution_array(void *out, void *x) {
  return set_array(out, [&] {
    return toast::summed("ToastDistribution", array_of(x), 4, toast_distribution);
  });
}

TOAST_API const char *toast_largest_array(void *out, void *x) {
  return set_array(out, [&] { return toast::largest(array_of(x)); });
}

TOAST_API const char *toast_partition_array(void *out, void *x, int kth) {
  return set_array(out, [&] { return toast::partitioned(array_of(x), kth); });
}

TOAST_API const char *toast_quantise_array(void *out, void *x) {
  return set_array(out, [&] { return toast::quantised(array_of(x)); });
}

TOAST_API const char *toast_dequantise_array(void *out, void *rows) {
  return set_array(out, [&] { return toast::dequantised(array_of(rows)); });
}

TOAST_API const char *toast_route_array(void **outs, void *x, void *bias,
                                        const toast_choice *choice) {
  return set_arrays(outs, [&] { return toast::routed(array_of(x), array_if(bias), *choice); });
}

TOAST_API const char *toast_blend_array(void *out, void *x, void *weights, void *more,
                                        void *gates) {
  return set_array(out, [&] {
    return toast::blended({array_of(x), array_of(weights), array_of(more), array_of(gates)});
  });
}

TOAST_API const char *toast_weighted_sum_array(void *out, void *x, void *weights) {
  return set_array(out, [&] { return toast::weighed(array_of(x), array_of(weights)); });
}

}  // extern "C"
