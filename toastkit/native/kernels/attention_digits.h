// int8 keys and values on int8 dot products. Their counterparts have 16 bits: integers with a scale
// per row, as two base-256 digits (AVX2: words, attention_words.h). Integer sums are exact in any
// order, so few queries, many queries and AMX all give the same bits.
//
//   score = (256 * sum of upper * key + sum of lower * key) * (query scale * key scale)
//
// A softmax weight is multiplied by its value's scale before it is quantised. Half a step is 2^-16
// of a query's largest magnitude, and 2^-17 of the largest such weight of a span.
#pragma once

#include <float.h>

#include "attention_room.h"
#include "functions.h"

namespace {

#if defined(__AVX2__)
INLINE bool is_int8(const toast_rows &rows) { return rows.type == TOAST_I8; }

constexpr float MIN_ROW_PEAK = 0x1p-100f;  // rows whose largest magnitude is below become zeros

// Quantisation step for numbers up to `max`, and its inverse, 0 if all become zeros. nan: 0, or NaN
// if any is NaN or infinite, which the step becomes.
struct Step {
  float step, inverse_step;
  INLINE Step of(float max, float nan, float largest) {
    const bool some = max > MIN_ROW_PEAK && max <= FLT_MAX;
    return {(some ? max / largest : 0) + nan, some ? largest / max : 0};
  }
};

// Of `size` numbers: floats(d), those from d on.
template <class Floats>
INLINE Step step_of_floats(int64_t size, float largest, const Floats &floats) {
  F32 max = {}, nan = {};
  for (int64_t d = 0; d < size; d += LANES) {
    const F32 v = floats(d), magnitude = (F32)((U32)v & 0x7fffffff);
    max = maximum(magnitude, max);
    nan += v - v;
  }
  return Step::of(horizontal_max(max), horizontal_sum(nan), largest);
}

// Weights times the scales of their values: 0 where that would be subnormal (see `exponential`),
// which is less than half a step of any span that is not all zeros. By the sum of both exponents,
// before they are multiplied.
INLINE F32 times_scales(F32 weights, F32 scales) {
  const U32 size = ((U32)weights & 0x7fffffff) + ((U32)scales & 0x7fffffff);
  const U32 least = U32{} + (bits_of(1) + bits_of(0x1p-125f));
  return (size < least ? F32{} : weights) * scales;
}

// Multiplies a row's weights, (keys), by `scales`, in place; returns their step. Both are padded
// with zeros to a multiple of LANES. NaN becomes 0, and the step NaN.
INLINE Step scale_weights(float *weights, const float *scales, int64_t keys, float largest) {
  F32 max = {}, nan = {};
  for (int64_t j = 0; j < keys; j += LANES) {
    const F32 v = times_scales(load<F32>(weights + j), load<F32>(scales + j));
    store(weights + j, v);
    max = maximum(v, max);
    nan = multiply_add(v, F32{}, nan);
  }
  return Step::of(horizontal_max(max), horizontal_sum(nan), largest);
}

// The same for LANES rows side by side, (keys, LANES), `stride` apart; stores their steps, and
// returns the inverse ones.
INLINE F32 scale_lanes(float *weights, const float *scales, int64_t stride, int64_t keys,
                       float largest, float *steps) {
  F32 max = {}, nan = {}, inverse_step;
  for (int64_t j = 0; j < keys; j++) {
    const F32 v = times_scales(load<F32>(weights + j * stride), splat(scales[j]));
    store(weights + j * stride, v);
    max = maximum(v, max);
    nan += v - v;
  }
  for (int i = 0; i < LANES; i++) {
    const Step step = Step::of(max[i], nan[i], largest);
    steps[i] = step.step, inverse_step[i] = step.inverse_step;
  }
  return inverse_step;
}

// Scales of a head's rows, zero-padded to a multiple of LANES.
INLINE void load_scales(const char *rows, int64_t stride, int64_t size, int64_t count, float *to) {
  for (int64_t j = 0; j < count; j++) to[j] = scale_of(rows + j * stride, size);
  for (int64_t j = count; j % LANES; j++) to[j] = 0;
}
#endif

#if defined(__AVX512VNNI__)
constexpr float MAX_QUERY = 127 * 256 + 127;   // digits in [-127, 127] and [-128, 127]
constexpr float MAX_WEIGHT = 255 * 256 + 255;  // both in [0, 255]

INLINE F32 from_digits(I32 upper, I32 lower) {
  return multiply_add(__builtin_convertvector(upper, F32), splat(256),
                      __builtin_convertvector(lower, F32));
}

// Mask of the first `left` bytes of a register.
INLINE __mmask64 byte_mask(int64_t left) {
  return left < REGISTER ? (uint64_t(1) << left) - 1 : ~uint64_t(0);
}

// A query's step, and the sums of its upper and lower digits.
struct QuantisedQuery {
  float step;
  int32_t sums[2];
};

// Quantises query r of a tile: put(d, part, digits d and following), zero-padded to `stride`.
template <class Put>
INLINE QuantisedQuery quantise_query(const toast::Attention &a, const toast::Tile &tile, int64_t r,
                                     int64_t stride, const Put &put) {
  const toast_attention &call = *a.call;
  const int64_t size = r < tile.rows ? call.key_size : 0;  // there is no such query: zeros
  const char *query = size ? query_of(a, tile, r) : nullptr;
  auto floats = [&](int64_t d) __attribute__((always_inline)) {
    return d < size ? some_floats_at(call.queries.type, query, d, int(size - d)) * call.scale
                    : F32{};
  };
  const Step step = step_of_floats(size, MAX_QUERY, floats);
  I32 uppers = {}, lowers = {};
  for (int64_t d = 0; d < stride; d += LANES) {
    const I32 v = step.inverse_step ? round_to_int(floats(d) * step.inverse_step) : I32{};
    const I32 upper = (v + 128) >> 8, lower = v - (upper << 8);
    put(d, 0, __builtin_convertvector(upper, I8));
    put(d, 1, __builtin_convertvector(lower, I8));
    uppers += upper, lowers += lower;
  }
  return {step.step,
          {_mm512_reduce_add_epi32((__m512i)uppers), _mm512_reduce_add_epi32((__m512i)lowers)}};
}

// Quantises a row's weights, (keys), times `scales` (in place) to digits; returns the step.
// Digits are padded with zeros to a multiple of LANES. between() is called once per LANES keys.
template <class Between>
INLINE float quantise_weights(float *weights, const float *scales, int64_t keys, uint8_t *upper,
                              uint8_t *lower, const Between &between) {
  const Step step = scale_weights(weights, scales, keys, MAX_WEIGHT);
  for (int64_t j = 0; j < keys; j += LANES) {
    between();
    const I32 v = round_to_int(load<F32>(weights + j) * step.inverse_step);
    store(upper + j, __builtin_convertvector(v >> 8, U8));
    store(lower + j, __builtin_convertvector(v, U8));
  }
  return step.step;
}

// Interleaves four keys' values bytewise, to words of four keys: the first eight (HIGH: last eight)
// of each 16 of REGISTER elements, in two registers. at: offsets of the keys.
template <bool HIGH>
INLINE void interleave_values(const char *values, const int64_t *at, __mmask64 some, I32 *fours) {
  __m512i row[4], pairs[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some, values + at[i]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    pairs[i] = HIGH ? _mm512_unpackhi_epi8(row[2 * i], row[2 * i + 1])
                      : _mm512_unpacklo_epi8(row[2 * i], row[2 * i + 1]);
  fours[0] = (I32)_mm512_unpacklo_epi16(pairs[0], pairs[1]);
  fours[1] = (I32)_mm512_unpackhi_epi16(pairs[0], pairs[1]);
}

// out[d] = step * sums, for 64 elements or those left. sums: two registers of upper digits, in
// interleave_values' order; those of HIGH are `high` words on, those of lower digits `lower` words
// on from each.
INLINE void store_values(const int32_t *sums, int64_t high, int64_t lower, float step, int64_t left,
                         float *out) {
  I32 r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int32_t *from = sums + i / 2 * high + i % 2 * LANES;
    r[i] = (I32)(from_digits(load<I32>(from), load<I32>(from + lower)) * step);
  }
  const I32 a = quarters<0x44>(r[0], r[1]), b = quarters<0x44>(r[2], r[3]);
  const I32 c = quarters<0xee>(r[0], r[1]), d = quarters<0xee>(r[2], r[3]);
  store(out, quarters<0x88>(a, b));
  if (left > LANES) store(out + LANES, quarters<0xdd>(a, b));
  if (left > 2 * LANES) store(out + 2 * LANES, quarters<0x88>(c, d));
  if (left > 3 * LANES) store(out + 3 * LANES, quarters<0xdd>(c, d));
}
#endif

}  // namespace
