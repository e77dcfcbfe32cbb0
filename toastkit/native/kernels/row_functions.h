// The row kernels of rows.h for one instruction set.
#pragma once

#include <math.h>

#include "functions.h"
#include "recurrent_rows.h"
#include "rows.h"

namespace {

// Sums add(x, accumulator) over a row, divided by columns. x: elements minus `mean` if centred, 0
// beyond the end.
template <class Add>
INLINE float mean_over(const toast::Norm &n, int64_t start, F32 mean, const Add &add) {
  constexpr int CHAINS = 4;
  F32 sums[CHAINS] = {};
  for (int64_t k = 0; k < n.columns; k += CHAINS * LANES)
    for (int i = 0; i < CHAINS && k + i * LANES < n.columns; i++) {
      const int64_t at = k + i * LANES;
      F32 x = some_floats_at(n.x->type, n.x->data, start + at, int(n.columns - at));
      if (n.centred) {
        x -= mean;
        for (int64_t over = n.columns - at; over < LANES; over++) x[over] = 0;
      }
      sums[i] = add(x, sums[i]);
    }
  return horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(n.columns);
}

static void norm_row(const toast::Norm &n, int64_t row) {
  const int64_t start = row * n.x->stride, to = row * n.columns;
  F32 mean = {};
  if (n.centred) mean = splat(mean_over(n, start, mean, [](F32 x, F32 s) { return x + s; }));
  const float variance =
      mean_over(n, start, mean, [](F32 x, F32 s) { return multiply_add(x, x, s); });
  const F32 scale = splat(1.0f / sqrtf(variance + n.eps));
  for (int64_t k = 0; k < n.columns; k += LANES) {
    const int some = int(n.columns - k < LANES ? n.columns - k : LANES);
    F32 y = some_floats_at(n.x->type, n.x->data, start + k, some);
    y = (n.centred ? y - mean : y) * scale;
    y *= n.weight ? some_floats_at(n.weight_type, n.weight, k, some) + n.plus : splat(n.plus);
    if (n.bias) y += some_floats_at(n.weight_type, n.bias, k, some);
    put_some(n.out_type, n.out, to + k, y, some);
  }
}

static void rotation_at(const toast_rotation &r, float position, float *cos, float *sin) {
  const int64_t half = r.dims / 2;
  const float scaled = position * r.scale;
  for (int64_t i = 0; i < half; i += LANES) {
    const int some = int(half - i < LANES ? half - i : LANES);
    F32 angle = some_floats_at(TOAST_F32, r.frequencies, i, some);
    angle = (r.inverse ? 1.0f / angle : angle) * scaled;  // not contracted, to get MLX's angles
    float c[LANES], s[LANES];
    if (horizontal_max((F32)((U32)angle & 0x7fffffff)) < MAX_ANGLE) {
      SinCos t = sin_cos(angle);
      store(c, t.cos);
      store(s, t.sin);
    } else {
      for (int k = 0; k < some; k++) c[k] = cosf(angle[k]), s[k] = sinf(angle[k]);
    }
    for (int k = 0; k < some; k++) {
      const int64_t at = r.traditional ? 2 * (i + k) : i + k;
      const int64_t partner = at + (r.traditional ? 1 : half);
      cos[at] = cos[partner] = c[k] * r.factor;
      sin[at] = -s[k] * r.factor, sin[partner] = s[k] * r.factor;
    }
  }
}

INLINE F32 swapped(F32 v) {  // swaps each pair
  typedef uint64_t U64 __attribute__((vector_size(4 * LANES)));
  return (F32)((U64)v << 32 | (U64)v >> 32);
}

static void rotate_head(const toast_heads &x, const toast_rotation &r, const float *cos,
                        const float *sin, int64_t from, int64_t to, void *out) {
  auto turn = [&](int64_t k, F32 a, F32 partner, int some) {
    F32 c = some_floats_at(TOAST_F32, cos, k, some), s = some_floats_at(TOAST_F32, sin, k, some);
    put_some(x.type, out, to + k, multiply_add(a, c, partner * s), some);
  };
  const int64_t half = r.dims / 2, parts = r.traditional ? r.dims : half;
  for (int64_t k = 0; k < parts; k += LANES) {
    const int some = int(parts - k < LANES ? parts - k : LANES);
    F32 a = some_floats_at(x.type, x.data, from + k, some);
    if (r.traditional) {
      turn(k, a, swapped(a), some);
    } else {
      F32 b = some_floats_at(x.type, x.data, from + half + k, some);
      turn(k, a, b, some);
      turn(half + k, b, a, some);
    }
  }
  const int64_t size = toast_type_bytes(x.type);
  memcpy(static_cast<char *>(out) + (to + r.dims) * size,
         static_cast<const char *>(x.data) + (from + r.dims) * size, (x.size - r.dims) * size);
}

// x * Phi(x), the normal CDF by Abramowitz and Stegun 7.1.26, to 1e-7.
INLINE F32 erf_gelu(F32 x) {
  F32 size = (F32)((U32)x & 0x7fffffff);
  F32 t = 1.0f / multiply_add(size, splat(0.23164189f), splat(1.0f));
  F32 p = multiply_add(t, splat(0.5307027145f), splat(-0.7265760135f));
  p = multiply_add(p, t, splat(0.7107068705f));
  p = multiply_add(p, t, splat(-0.142248368f));
  p = multiply_add(p, t, splat(0.1274147955f));
  F32 beyond = p * t * exponential(x * x * -0.5f);
  return x * (x > 0 ? 1.0f - beyond : beyond);
}

INLINE F32 activated(int activation, F32 x) {
  if (activation == TOAST_FINITE) {
    F32 size = (F32)((U32)x & 0x7fffffff), guard = splat(1e4f);
    F32 y = size == INFINITY ? (x > 0 ? guard : -guard) : x;
    return x == x ? y : F32{};
  }
  if (activation == TOAST_ERF) return erf_gelu(x);
  if (activation == TOAST_RELU2) return x > 0 || x != x ? x * x : F32{};
  F32 y = x;
  if (activation == TOAST_OAI) x = minimum(splat(7.0f), x), y = x * 1.702f;
  if (activation == TOAST_GELU)  // (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
    y = multiply_add(x * x * x, splat(0.044715f), x) * 1.5957691216057308f;
  return (activation == TOAST_SIGMOID ? splat(1.0f) : x) / (exponential(-y) + 1.0f);
}

static void gate_numbers(const toast::Gate &g, int64_t first, int64_t end) {
  for (int64_t k = first; k < end; k += LANES) {
    const int some = int(end - k < LANES ? end - k : LANES);
    F32 y = activated(g.activation, some_floats_at(g.type, g.gate, k, some));
    if (g.x) {
      F32 x = some_floats_at(g.type, g.x, k, some);
      y *= g.activation == TOAST_OAI ? minimum(splat(7.0f), maximum(splat(-7.0f), x)) + 1.0f : x;
    }
    put_some(g.type, g.out, k, y, some);
  }
}

// Fills missing lanes with -inf, whose exp is 0.
INLINE F32 some_or_least(int type, const void *x, int64_t at, int some) {
  F32 v = some_floats_at(type, x, at, some);
  for (int i = some; i < LANES; i++) v[i] = -INFINITY;
  return v;
}

static float row_max(int type, const void *x, int64_t first, int64_t count) {
  F32 max = splat(-INFINITY);
  for (int64_t k = 0; k < count; k += LANES) {
    const int some = int(count - k < LANES ? count - k : LANES);
    max = maximum(some_or_least(type, x, first + k, some), max);
  }
  return horizontal_max(max);
}

static int64_t find_value(int type, const void *x, int64_t first, int64_t count, float number) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int some = int(count - k < LANES ? count - k : LANES);
    F32 v = some_floats_at(type, x, first + k, some);
    if (!horizontal_sum(v == number ? splat(1) : F32{})) continue;
    for (int i = 0; i < some; i++)
      if (v[i] == number) return k + i;
  }
  return -1;
}

static toast::Exponentials exponentials(int type, const void *x, int64_t first, int64_t count) {
  F32 totals = {}, products = {};
  const float top = row_max(type, x, first, count);
  if (top == -INFINITY) {  // all -inf, or NaN
    float total = 0;
    for (int64_t k = 0; k < count; k += LANES)
      total += horizontal_sum(some_floats_at(type, x, first + k, int(count - k)));
    return {top, total == total ? 0 : total, 0};
  }
  constexpr int64_t BLOCK = 512;  // summed separately, for less rounding error
  for (int64_t start = 0; start < count; start += BLOCK) {
    F32 part = {}, product = {};
    for (int64_t k = start; k < count && k < start + BLOCK; k += LANES) {
      const int some = int(count - k < LANES ? count - k : LANES);
      F32 d = some_or_least(type, x, first + k, some) - top, power = exponential(d);
      part += power;
      product = multiply_add(power, maximum(d, splat(toast::MIN_EXPONENT)), product);
    }
    totals += part;
    products += product;
  }
  return {top, horizontal_sum(totals), horizontal_sum(products)};
}

static void softmax_part(int type, const void *x, int64_t first, int64_t count,
                         toast::Exponentials sums, void *out, int out_type, int64_t to) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int some = int(count - k < LANES ? count - k : LANES);
    F32 y = exponential(some_floats_at(type, x, first + k, some) - sums.max) / sums.sum;
    put_some(out_type, out, to + k, y, some);
  }
}

static void weighted_sum(const toast::WeightedSum &w, int64_t row) {
  for (int64_t k = 0; k < w.columns; k += LANES) {
    const int some = int(w.columns - k < LANES ? w.columns - k : LANES);
    F32 total = {};
    for (int64_t i = row * w.group; i < (row + 1) * w.group; i++) {
      F32 x = some_floats_at(w.x->type, w.x->data, i * w.x->stride + k, some);
      total = multiply_add(x, splat(w.weights[i]), total);
    }
    put_some(w.out_type, w.out, row * w.columns + k, total, some);
  }
}

constexpr float MAX_QUANTISED = 3e38f;  // 127 * (MAX_QUANTISED / 127) stays finite

// x / scale, rounded to nearest even, as MLX's operations would.
static void quantise_row(int type, const void *x, int64_t from, int64_t count, void *row) {
  auto numbers = [&](int64_t k) __attribute__((always_inline)) {
    F32 v = some_floats_at(type, x, from + k, int(count - k < LANES ? count - k : LANES));
    return v > MAX_QUANTISED    ? splat(MAX_QUANTISED)
           : v < -MAX_QUANTISED ? splat(-MAX_QUANTISED)
                                : v;
  };
  F32 max = {}, nan = {};
  for (int64_t k = 0; k < count; k += LANES) {
    F32 v = numbers(k);
    max = maximum((F32)((U32)v & 0x7fffffff), max);
    nan += v * 0.0f;  // NaN if any is
  }
  const float scale = horizontal_max(max) / 127.0f + horizontal_sum(nan);
  auto out = static_cast<int8_t *>(row);
  for (int64_t k = 0; k < count; k += LANES) {
    F32 v = scale > 0 ? numbers(k) / scale : F32{};
    v = minimum(splat(127.0f), maximum(splat(-127.0f), v));
    constexpr float MAGIC = 0x1.8p23f;  // adding it rounds to an integer
    const I8 bytes = __builtin_convertvector(v + MAGIC - MAGIC, I8);
    memcpy(out + k, &bytes, count - k < LANES ? count - k : LANES);
  }
  memcpy(out + count, &scale, sizeof scale);
}

static void dequantise_row(const void *row, int64_t count, float *out) {
  for (int64_t k = 0; k < count; k += LANES)
    put_some(TOAST_F32, out, k, floats_of_row(TOAST_I8, row, count, k),
             int(count - k < LANES ? count - k : LANES));
}

static void store_row(int type, const void *x, int64_t from, int64_t count, void *out, int out_type,
                      int64_t to) {
  if (out_type == TOAST_I8)
    return quantise_row(type, x, from, count, static_cast<int8_t *>(out) + to);
  const F32 max = splat(out_type == TOAST_F16 ? 65504.0f : INFINITY);
  for (int64_t k = 0; k < count; k += LANES) {
    const int some = int(count - k < LANES ? count - k : LANES);
    F32 v = minimum(max, some_floats_at(type, x, from + k, some));  // keeps NaN
    put_some(out_type, out, to + k, maximum(-max, v), some);
  }
}

INLINE float float_at(int type, const void *p, int64_t i) {
  if (type == TOAST_F32) return static_cast<const float *>(p)[i];
  return some_floats_at(type, p, i, 1)[0];
}

// x at position t < length; before 0 those of `before`, or zeros.
INLINE F32 position_at(const toast_convolution &c, int64_t batch, int64_t t, int64_t channel,
                       int some) {
  if (t >= 0)
    return some_floats_at(c.type, c.x, batch * c.strides[0] + t * c.strides[1] + channel, some);
  const int64_t row = batch * c.before_strides[0] + (t + c.kernel - 1) * c.before_strides[1];
  return c.before ? some_floats_at(c.type, c.before, row + channel, some) : F32{};
}

// Weights of channels by position, then their biases.
static void load_taps(const toast_convolution &c, int64_t first, int64_t end,
                      float (*taps)[toast::CHANNEL_BLOCK]) {
  for (int64_t i = first; i < end; i++)
    taps[c.kernel][i - first] = c.bias ? float_at(c.weight_type, c.bias, i) : 0;
  auto weights = static_cast<const float *>(c.weight);  // if float32
  int64_t i = first;
  // Whole registers, which end before the last weight.
  const bool whole = c.weight_type == TOAST_F32 && c.kernel <= LANES;
  for (; whole && i + LANES <= end && (i + LANES - 1 - c.channels) * c.kernel + LANES <= 0;
       i += LANES) {
    F32 r[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) r[k] = load<F32>(weights + (i + k) * c.kernel);
    transpose(r);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
      if (j < c.kernel) store(taps[j] + i - first, r[j]);
  }
  for (; i < end; i++)
    for (int64_t j = 0; j < c.kernel; j++)
      taps[j][i - first] = float_at(c.weight_type, c.weight, i * c.kernel + j);
}

static void convolve_channels(const toast_convolution &c, int64_t batch, int64_t first,
                              int64_t end, void *out, int out_type) {
  float weights[toast::MAX_KERNEL + 1][toast::CHANNEL_BLOCK];
  load_taps(c, first, end, weights);
  const float *x = static_cast<const float *>(c.x) + batch * c.strides[0];  // if float32
  for (int64_t t = 0; t < c.length; t++) {
    const int64_t from = t - c.kernel + 1;
    const bool plain = c.type == TOAST_F32 && out_type == TOAST_F32 && from >= 0;
    for (int64_t i = first; i < end; i += LANES) {
      const int some = int(end - i < LANES ? end - i : LANES);
      const int64_t at = (batch * c.length + t) * c.out_step + i;
      const bool whole = plain && some == LANES;
      F32 y = some_floats_at(TOAST_F32, weights[c.kernel], i - first, some);
      if (whole) {
        for (int64_t j = 0; j < c.kernel; j++)
          y = multiply_add(load<F32>(x + (from + j) * c.strides[1] + i),
                           load<F32>(weights[j] + i - first), y);
      } else {
        for (int64_t j = 0; j < c.kernel; j++)
          y = multiply_add(position_at(c, batch, from + j, i, some),
                           some_floats_at(TOAST_F32, weights[j], i - first, some), y);
      }
      if (c.silu) y = activated(TOAST_SILU, y);
      if (whole) {
        store(static_cast<float *>(out) + at, y);
      } else {
        put_some(out_type, out, at, y, some);
      }
    }
  }
}

const toast::RowInstructions row_functions = {
    norm_row,     rotation_at,  rotate_head, gate_numbers,   row_max,
    find_value,   exponentials, softmax_part, weighted_sum,  store_row,
    dequantise_row, convolve_channels,
    {delta_rows, scan_rows, wkv_rows, linear_rows, column_decays}};

}  // namespace
