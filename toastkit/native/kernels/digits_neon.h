// Quantised weights times 16-bit activations, on ARM int8 dot products (dotprod) and matrix
// products (i8mm).
//
// As in digits.h a group of activations is d * v, v int16 in two base-256 digits. A group's sum of
// q * v fits into int32 (128 * 255 * 2^15 at most), so it is exact in any order. Lanes are rows,
// and groups are added in order: both instruction sets and all tiles give the same bits.
#pragma once

#include <arm_neon.h>

#include "floats.h"

namespace {

constexpr float MAX_DIGITS = 127 * 256 + 127;
constexpr float MIN_PEAK = 0x1p-100f;  // groups whose largest magnitude is below become zeros
constexpr int TILE_ROWS = 4;
constexpr int64_t PREFETCH_BYTES = 2048;  // bytes ahead

// A prepared vector: blocks that each meet 16 bytes of weights, upper digits, then lower ones
// (nibbles: those of even columns before odd ones); then, per group, d, d * sum of v, and sum of v.
template <bool NIBBLES>
struct Layout {
  static constexpr int WEIGHTS = NIBBLES ? 32 : 16;
  static constexpr int DIGITS = 2 * WEIGHTS;
  int64_t groups, steps, sums, int_sums, bytes;
  INLINE Layout of(const toast_matrix &m) {
    Layout l;
    l.groups = m.columns / m.group_size;
    l.steps = m.columns / WEIGHTS * DIGITS;
    const int64_t floats = (l.groups + LANES - 1) / LANES * LANES * int64_t(sizeof(float));
    l.sums = l.steps + floats;
    l.int_sums = l.sums + floats;
    l.bytes = (l.int_sums + floats + 63) / 64 * 64 + 64;  // see float_stride
    return l;
  }
};

// The digits of 16 v.
struct Digits {
  int8x16_t upper, lower;
  INLINE Digits of(const int32x4_t *v) {
    int16x8_t wide[2], high[2];
    for (int i = 0; i < 2; i++) {
      wide[i] = vcombine_s16(vmovn_s32(v[2 * i]), vmovn_s32(v[2 * i + 1]));
      high[i] = vshrq_n_s16(vqaddq_s16(wide[i], vdupq_n_s16(128)), 8);
    }
    return {vcombine_s8(vmovn_s16(high[0]), vmovn_s16(high[1])),
            vcombine_s8(vmovn_s16(wide[0]), vmovn_s16(wide[1]))};
  }
};

template <bool NIBBLES>
static void prepare_digits(const toast::Product &p, int64_t row) {
  const toast_matrix &m = *p.matrix;
  const toast_vectors &x = *p.x;
  const auto layout = Layout<NIBBLES>::of(m);
  char *out = p.prepared + row * p.prepared_stride;
  auto steps = reinterpret_cast<float *>(out + layout.steps);
  auto sums = reinterpret_cast<float *>(out + layout.sums);
  auto int_sums = reinterpret_cast<int32_t *>(out + layout.int_sums);
  memset(out + layout.steps, 0, layout.bytes - layout.steps);
  auto digits = reinterpret_cast<int8_t *>(out);
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t start = row * x.stride + g * m.group_size;
    // Float bits compare as integers: infinity above all finite numbers, NaN above infinity.
    U32 max_bits = {};
    for (int k = 0; k < m.group_size; k += LANES) {
      U32 size = (U32)floats_at(x.type, x.data, start + k) & 0x7fffffff;
      max_bits = (U32)vmaxq_u32((uint32x4_t)max_bits, (uint32x4_t)size);
    }
    const uint32_t peak = vmaxvq_u32((uint32x4_t)max_bits);
    float step = of_bits(peak) / MAX_DIGITS, inverse_step = MAX_DIGITS / of_bits(peak);
    if (peak >= 0x7f800000) step = of_bits(0x7fc00000);
    if (peak >= 0x7f800000 || of_bits(peak) < MIN_PEAK) inverse_step = 0;
    int32_t total = 0;
    for (int k = 0; k < m.group_size; k += Layout<NIBBLES>::WEIGHTS) {
      Digits both[2];
      for (int half = 0; half < (NIBBLES ? 2 : 1); half++) {
        int32x4_t v[4];
        for (int i = 0; i < 4; i++) {
          F32 value = floats_at(x.type, x.data, start + k + 16 * half + 4 * i);
          v[i] = inverse_step ? vcvtnq_s32_f32((float32x4_t)(value * inverse_step))
                              : vdupq_n_s32(0);
          total += vaddvq_s32(v[i]);
        }
        both[half] = Digits::of(v);
      }
      if (NIBBLES) {
        vst1q_s8(digits, vuzp1q_s8(both[0].upper, both[1].upper));
        vst1q_s8(digits + 16, vuzp2q_s8(both[0].upper, both[1].upper));
        vst1q_s8(digits + 32, vuzp1q_s8(both[0].lower, both[1].lower));
        vst1q_s8(digits + 48, vuzp2q_s8(both[0].lower, both[1].lower));
      } else {
        vst1q_s8(digits, both[0].upper);
        vst1q_s8(digits + 16, both[0].lower);
      }
      digits += Layout<NIBBLES>::DIGITS;
    }
    steps[g] = step;
    sums[g] = step * float(total);
    int_sums[g] = total;
  }
}

// The 16 bytes of a block as codes; nibbles: even columns, then odd ones. E2M1: see E2M1_CODES.
template <bool NIBBLES, bool E2M1>
INLINE void unpack_block(const uint8_t *p, uint8x16_t *out) {
  uint8x16_t q = vld1q_u8(p);
  out[0] = NIBBLES ? vandq_u8(q, vdupq_n_u8(15)) : q;
  if (NIBBLES) out[1] = vshrq_n_u8(q, 4);
  for (int i = 0; E2M1 && i < 2; i++) out[i] = vqtbl1q_u8(vld1q_u8(E2M1_CODES), out[i]);
}

// sum += weights . digits, four at a time. dotprod alone has signed bytes only: 8-bit codes have
// 128 subtracted, which sign_correction restores from the sum of v.
INLINE int32x4_t dot(int32x4_t sum, uint8x16_t weights, int8x16_t digits, bool is_8bit) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  (void)is_8bit;
  return vusdotq_s32(sum, weights, digits);
#else
  if (is_8bit) weights = veorq_u8(weights, vdupq_n_u8(128));
  return vdotq_s32(sum, vreinterpretq_s8_u8(weights), digits);
#endif
}

INLINE int32_t sign_correction(int32_t total, bool is_8bit) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  (void)total, (void)is_8bit;
  return 0;
#else
  return is_8bit ? 128 * total : 0;
#endif
}

// The sums of q * v over blocks [first, end) for M vectors; lanes are four rows.
template <bool NIBBLES, bool E2M1, int M>
INLINE void group_sums(const char *const *vectors, const uint8_t *const *rows, int64_t first,
                       int64_t end, bool is_8bit, int32x4_t *out) {
  constexpr int PARTS = NIBBLES ? 2 : 1;
  int32x4_t upper[M][TILE_ROWS], lower[M][TILE_ROWS];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < TILE_ROWS; j++) upper[i][j] = lower[i][j] = vdupq_n_s32(0);
  for (int64_t b = first; b < end; b++) {
    uint8x16_t weights[TILE_ROWS][2];
    for (int j = 0; j < TILE_ROWS; j++) {
      unpack_block<NIBBLES, E2M1>(rows[j] + b * 16, weights[j]);
      if (M == 1) __builtin_prefetch(rows[j] + b * 16 + PREFETCH_BYTES);
    }
    for (int i = 0; i < M; i++) {
      auto digits = reinterpret_cast<const int8_t *>(vectors[i]) + b * Layout<NIBBLES>::DIGITS;
      for (int part = 0; part < PARTS; part++) {
        int8x16_t high = vld1q_s8(digits + 16 * part), low = vld1q_s8(digits + 16 * (PARTS + part));
        for (int j = 0; j < TILE_ROWS; j++) {
          upper[i][j] = dot(upper[i][j], weights[j][part], high, is_8bit);
          lower[i][j] = dot(lower[i][j], weights[j][part], low, is_8bit);
        }
      }
    }
  }
  for (int i = 0; i < M; i++) {
    int32x4_t sums[TILE_ROWS];
    for (int j = 0; j < TILE_ROWS; j++)
      sums[j] = vaddq_s32(vshlq_n_s32(upper[i][j], 8), lower[i][j]);
    out[i] = vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
INLINE int64x2_t as_i64(int8x16_t v) { return vreinterpretq_s64_s8(v); }
INLINE int64x2_t as_i64(uint8x16_t v) { return vreinterpretq_s64_u8(v); }

// The same for four vectors, by 2 x 8 times 8 x 2 matrix products.
template <bool NIBBLES, bool E2M1>
INLINE void group_sums_of_four(const char *const *vectors, const uint8_t *const *rows,
                               int64_t first, int64_t end, int32x4_t *out) {
  constexpr int PARTS = NIBBLES ? 2 : 1;
  int32x4_t sums[2][2][2] = {};  // [digit][pair of rows][pair of vectors]
  for (int64_t b = first; b < end; b++) {
    uint8x16_t weights[TILE_ROWS][2];
    for (int j = 0; j < TILE_ROWS; j++) unpack_block<NIBBLES, E2M1>(rows[j] + b * 16, weights[j]);
    for (int part = 0; part < PARTS; part++) {
      uint8x16_t pairs[2][2];  // [pair of rows][first or last eight codes]
      for (int j = 0; j < 2; j++) {
        int64x2_t one = as_i64(weights[2 * j][part]), two = as_i64(weights[2 * j + 1][part]);
        pairs[j][0] = vreinterpretq_u8_s64(vzip1q_s64(one, two));
        pairs[j][1] = vreinterpretq_u8_s64(vzip2q_s64(one, two));
      }
      for (int digit = 0; digit < 2; digit++) {
        const int64_t at = b * Layout<NIBBLES>::DIGITS + 16 * (PARTS * digit + part);
        for (int i = 0; i < 2; i++) {
          auto a = reinterpret_cast<const int8_t *>(vectors[2 * i] + at);
          auto c = reinterpret_cast<const int8_t *>(vectors[2 * i + 1] + at);
          int64x2_t one = as_i64(vld1q_s8(a)), two = as_i64(vld1q_s8(c));
          int8x16_t low = vreinterpretq_s8_s64(vzip1q_s64(one, two));
          int8x16_t high = vreinterpretq_s8_s64(vzip2q_s64(one, two));
          for (int j = 0; j < 2; j++) {
            int32x4_t sum = vusmmlaq_s32(sums[digit][j][i], pairs[j][0], low);
            sums[digit][j][i] = vusmmlaq_s32(sum, pairs[j][1], high);
          }
        }
      }
    }
  }
  for (int i = 0; i < 2; i++) {
    int32x4_t combined[2];  // row 0 with vectors 0 and 1, then row 1
    for (int j = 0; j < 2; j++)
      combined[j] = vaddq_s32(vshlq_n_s32(sums[0][j][i], 8), sums[1][j][i]);
    out[2 * i] = vuzp1q_s32(combined[0], combined[1]);
    out[2 * i + 1] = vuzp2q_s32(combined[0], combined[1]);
  }
}
#endif

// Scales or biases of four rows and four groups, transposed: out[group], lanes are rows.
INLINE void scales_by_group(const toast_matrix &m, const void *p, const int64_t *rows,
                            int64_t groups, int64_t g, float32x4_t *out) {
  float32x4_t loaded[TILE_ROWS];
  for (int j = 0; j < TILE_ROWS; j++)
    loaded[j] = (float32x4_t)scales_at(m, p, rows[j] * groups + g, int(groups - g));
  float64x2_t even[2], odd[2];
  for (int j = 0; j < 2; j++) {
    even[j] = vreinterpretq_f64_f32(vtrn1q_f32(loaded[2 * j], loaded[2 * j + 1]));
    odd[j] = vreinterpretq_f64_f32(vtrn2q_f32(loaded[2 * j], loaded[2 * j + 1]));
  }
  out[0] = vreinterpretq_f32_f64(vzip1q_f64(even[0], even[1]));
  out[1] = vreinterpretq_f32_f64(vzip1q_f64(odd[0], odd[1]));
  out[2] = vreinterpretq_f32_f64(vzip2q_f64(even[0], even[1]));
  out[3] = vreinterpretq_f32_f64(vzip2q_f64(odd[0], odd[1]));
}

// M vectors times `count` <= 4 rows from `first` on.
template <bool NIBBLES, bool E2M1, int M>
static void digit_tile(const toast::Product &p, const toast::ExpertBatch &batch,
                       const uint32_t *outputs, const uint8_t *const *at, int64_t first,
                       int count) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout<NIBBLES>::of(m);
  const int64_t blocks = m.group_size / Layout<NIBBLES>::WEIGHTS;
  const bool is_8bit = m.bits == 8;
  const char *vectors[M];
  const uint8_t *rows[TILE_ROWS];
  int64_t numbers[TILE_ROWS];
  for (int i = 0; i < M; i++)
    vectors[i] = p.prepared + (p.vector ? p.vector[outputs[i]] : outputs[i]) * p.prepared_stride;
  for (int j = 0; j < TILE_ROWS; j++) {  // missing rows repeat the last, and are dropped
    const int row = j < count ? j : count - 1;
    rows[j] = at[row];
    numbers[j] = batch.expert * m.rows + first + row;
  }
  float32x4_t sums[M];
  for (int i = 0; i < M; i++) sums[i] = vdupq_n_f32(0);
  for (int64_t g = 0; g < layout.groups; g += 4) {
    float32x4_t scales[4], biases[4];
    scales_by_group(m, m.scales, numbers, layout.groups, g, scales);
    if (!E2M1) scales_by_group(m, m.biases, numbers, layout.groups, g, biases);
    for (int i = 0; E2M1 && i < 4; i++) biases[i] = vmulq_n_f32(scales[i], E2M1_BIAS);
    for (int64_t n = g; n < g + 4 && n < layout.groups; n++) {
      int32x4_t exact[M];
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (M == 4) {
        group_sums_of_four<NIBBLES, E2M1>(vectors, rows, n * blocks, (n + 1) * blocks, exact);
      } else {
        group_sums<NIBBLES, E2M1, M>(vectors, rows, n * blocks, (n + 1) * blocks, is_8bit, exact);
      }
#else
      group_sums<NIBBLES, E2M1, M>(vectors, rows, n * blocks, (n + 1) * blocks, is_8bit, exact);
#endif
      for (int i = 0; i < M; i++) {
        auto steps = reinterpret_cast<const float *>(vectors[i] + layout.steps);
        auto totals = reinterpret_cast<const float *>(vectors[i] + layout.sums);
        auto int_sums = reinterpret_cast<const int32_t *>(vectors[i] + layout.int_sums);
        exact[i] = vaddq_s32(exact[i], vdupq_n_s32(sign_correction(int_sums[n], is_8bit)));
        sums[i] = vfmaq_f32(sums[i], vcvtq_f32_s32(exact[i]), vmulq_n_f32(scales[n - g], steps[n]));
        sums[i] = vfmaq_n_f32(sums[i], biases[n - g], totals[n]);
      }
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < count; j++)
      put(p.out_type, p.out, outputs[i] * m.rows + first + j, ((F32)sums[i])[j]);
}

template <bool NIBBLES, bool E2M1>
static bool multiply_digits(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr int MANY = 4;
#else
  constexpr int MANY = 2;
#endif
  const toast_matrix &m = *p.matrix;
  const bool packed_as_is = NIBBLES || m.bits == 8;
  uint8_t *bytes = nullptr;
  if (!packed_as_is) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, TILE_ROWS * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += TILE_ROWS) {
    const uint8_t *rows[TILE_ROWS];
    const int count = int(end - n < TILE_ROWS ? end - n : TILE_ROWS);
    for (int j = 0; j < count; j++) {
      rows[j] = row_at(m, batch.expert * m.rows + n + j);
      if (!packed_as_is) {
        unpack_bytes(m, rows[j], bytes + j * m.columns);
        rows[j] = bytes + j * m.columns;
      }
    }
    int64_t i = 0;
    for (; i + MANY <= batch.size; i += MANY)
      digit_tile<NIBBLES, E2M1, MANY>(p, batch, batch.outputs + i, rows, n, count);
    for (; i < batch.size; i++)
      digit_tile<NIBBLES, E2M1, 1>(p, batch, batch.outputs + i, rows, n, count);
  }
  return true;
}

static int64_t prepared_bytes(const toast::Product &p) {
  if (toast::in_floats(p)) return float_bytes(p);
  return p.matrix->bits == 4 ? Layout<true>::of(*p.matrix).bytes
                             : Layout<false>::of(*p.matrix).bytes;
}

static void prepare(const toast::Product &p, int64_t row) {
  if (toast::in_floats(p)) return prepare_floats(p, row);
  return p.matrix->bits == 4 ? prepare_digits<true>(p, row) : prepare_digits<false>(p, row);
}

static bool multiply(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                     int64_t end) {
  if (toast::in_floats(p)) return multiply_floats(p, batch, first, end);
  if (p.matrix->type == TOAST_E8M0) return multiply_digits<true, true>(p, batch, first, end);
  return p.matrix->bits == 4 ? multiply_digits<true, false>(p, batch, first, end)
                             : multiply_digits<false, false>(p, batch, first, end);
}

}  // namespace
