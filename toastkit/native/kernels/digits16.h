// Quantised weights times 16-bit activations, 16 bytes of a row at a time: on the int8 dot products
// of ARM (dotprod, i8mm); on AVX2 and AVX-VNNI, whose registers hold 16 bytes of two rows, with
// products of words (words16.h).
//
// As in digits.h a group of activations is d * v, v int16 in two base-256 digits. A group's sum of
// q * v fits into int32 (128 * 255 * 2^15 at most), so it is exact in any order. Lanes are rows,
// and groups are added in order: all instruction sets and tiles give the same bits, of the same v
// (words16.h has fewer of them for TOAST_PAIRS).
#pragma once

#include <initializer_list>

#include "dot16.h"
#include "prefetch.h"

namespace {

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

// Prefetches the scales or biases that the next tile needs where this one needs those of group g.
INLINE void prefetch_scales(const toast_matrix &m, const void *p, const int64_t *rows,
                            int64_t groups, int64_t g) {
  const int64_t size = toast_type_bytes(m.type);
  if (g * size % LINE >= LANES * size) return;  // in a line that was requested
#pragma GCC unroll 8
  for (int j = 0; j < LANES; j++)
    prefetch(static_cast<const char *>(p) + ((rows[j] + LANES) * groups + g) * size);
}

template <int TYPE>
INLINE void whole_scales(const void *p, const int64_t *rows, int64_t groups, int64_t g, F32 *out) {
#pragma GCC unroll 8
  for (int j = 0; j < LANES; j++) out[j] = Dtype<TYPE>::at(p, rows[j] * groups + g);
}

// Scales or biases of LANES rows and groups, transposed: out[group], lanes are rows.
static __attribute__((noinline)) void scales_by_group(const toast_matrix &m, const void *p,
                                                      const int64_t *rows, int64_t groups,
                                                      int64_t g, F32 *out) {
  const bool whole = groups - g >= LANES;  // the usual case, with one question for all rows
  F32 at[LANES];
  if (whole && m.type == TOAST_BF16) {
    whole_scales<TOAST_BF16>(p, rows, groups, g, at);
  } else if (whole && m.type == TOAST_F16) {
    whole_scales<TOAST_F16>(p, rows, groups, g, at);
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < LANES; j++) at[j] = scales_at(m, p, rows[j] * groups + g, int(groups - g));
  }
  transpose(at);
#pragma GCC unroll 8
  for (int j = 0; j < LANES; j++) out[j] = at[j];
}

// Scales and biases likewise.
template <bool E2M1>
INLINE void both_by_group(const toast_matrix &m, const int64_t *rows, int64_t groups, int64_t g,
                          F32 *scales, F32 *biases) {
  scales_by_group(m, m.scales, rows, groups, g, scales);
  if (!E2M1) return scales_by_group(m, m.biases, rows, groups, g, biases);
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) biases[i] = scales[i] * E2M1_BIAS;
}

}  // namespace

#if defined(__AVX2__)
#include "words16.h"
#else

namespace {

// The numbers v of a prepared vector.
struct Numbers {
  static constexpr float largest = MAX_DIGITS;
  INLINE Numbers of(const toast::Product &) { return {}; }
  I32 rounded(I32 v) const { return v; }
};

// The digits of so many numbers as WEIGHTS.
template <bool NIBBLES>
INLINE void store_block(Numbers, const I32 *v, char *out) {
  constexpr int HALVES = NIBBLES ? 2 : 1, PARTS = 16 / LANES;
  auto digits = reinterpret_cast<Digits *>(out);
  Digits upper[2], lower[2];
  for (int half = 0; half < HALVES; half++) {
    I32 low[PARTS], high[PARTS];
    for (int i = 0; i < PARTS; i++) {
      const I32 one = v[half * PARTS + i];
      high[i] = (one + 128) >> 8;
      low[i] = one << 24 >> 24;
    }
    upper[half] = narrowed(high), lower[half] = narrowed(low);
  }
  for (const Digits *both : {upper, lower}) {
    *digits++ = NIBBLES ? even(both[0], both[1]) : both[0];
    if (NIBBLES) *digits++ = odd(both[0], both[1]);
  }
}

// The codes of 16 bytes of the rows in a register; nibbles: of even columns (part 0), or of odd
// ones. E2M1: see E2M1_CODES.
template <bool NIBBLES, bool E2M1>
INLINE I32 codes_at(const uint8_t *const *rows, int64_t at, int part) {
  const I32 q = load_codes(rows, at);
  const I32 codes = !NIBBLES ? q : part ? high_codes(q) : low_codes(q);
  return E2M1 ? e2m1(codes) : codes;
}

// The sums of q * v over blocks [first, end) for M vectors; lanes are rows. Upper digits come
// first: shifted, their sums go on with the lower ones in the same registers.
template <bool NIBBLES, bool E2M1, int M>
INLINE void group_sums(const char *const *vectors, const uint8_t *const *rows, int64_t first,
                       int64_t end, int64_t ahead, bool is_8bit, I32 *out) {
  constexpr int PARTS = NIBBLES ? 2 : 1;
  I32 sums[M][ROW_REGISTERS] = {};
  for (int64_t at = (first * 16 + LINE - 1) / LINE * LINE; ahead && at < end * 16; at += LINE)
#pragma GCC unroll 8
    for (int j = 0; j < LANES; j++) prefetch(rows[j] + at + ahead);
#pragma GCC unroll 2
  for (int digit = 0; digit < 2; digit++) {
#pragma GCC unroll 4
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
      for (int j = 0; digit && j < ROW_REGISTERS; j++) sums[i][j] = sums[i][j] << 8;
    for (int64_t b = first; b < end; b++) {
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        const int64_t at = b * Layout<NIBBLES>::DIGITS + 16 * (PARTS * digit + part);
        I32 digits[M];
#pragma GCC unroll 4
        for (int i = 0; i < M; i++)
          digits[i] = load_digits(reinterpret_cast<const int8_t *>(vectors[i]) + at);
#pragma GCC unroll 4
        for (int j = 0; j < ROW_REGISTERS; j++) {
          const I32 codes = codes_at<NIBBLES, E2M1>(rows + j, b * 16, part);
#pragma GCC unroll 4
          for (int i = 0; i < M; i++) sums[i][j] = dot(sums[i][j], codes, digits[i], is_8bit);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++) out[i] = sums_of_rows(sums[i]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
INLINE int64x2_t as_i64(int8x16_t v) { return vreinterpretq_s64_s8(v); }

// The same for four vectors, by 2 x 8 times 8 x 2 matrix products.
template <bool NIBBLES, bool E2M1>
INLINE void group_sums_of_four(const char *const *vectors, const uint8_t *const *rows,
                               int64_t first, int64_t end, I32 *out) {
  constexpr int PARTS = NIBBLES ? 2 : 1;
  int32x4_t sums[2][2][2] = {};  // [digit][pair of rows][pair of vectors]
  for (int64_t b = first; b < end; b++) {
    I32 weights[ROW_REGISTERS][2];
#pragma GCC unroll 4
    for (int j = 0; j < ROW_REGISTERS; j++)
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++)
        weights[j][part] = codes_at<NIBBLES, E2M1>(rows + j, b * 16, part);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      uint8x16_t pairs[2][2];  // [pair of rows][first or last eight codes]
#pragma GCC unroll 4
      for (int j = 0; j < 2; j++) {
        int64x2_t one = (int64x2_t)weights[2 * j][part], two = (int64x2_t)weights[2 * j + 1][part];
        pairs[j][0] = vreinterpretq_u8_s64(vzip1q_s64(one, two));
        pairs[j][1] = vreinterpretq_u8_s64(vzip2q_s64(one, two));
      }
#pragma GCC unroll 4
      for (int digit = 0; digit < 2; digit++) {
        const int64_t at = b * Layout<NIBBLES>::DIGITS + 16 * (PARTS * digit + part);
#pragma GCC unroll 4
        for (int i = 0; i < 2; i++) {
          auto a = reinterpret_cast<const int8_t *>(vectors[2 * i] + at);
          auto c = reinterpret_cast<const int8_t *>(vectors[2 * i + 1] + at);
          int64x2_t one = as_i64(vld1q_s8(a)), two = as_i64(vld1q_s8(c));
          int8x16_t low = vreinterpretq_s8_s64(vzip1q_s64(one, two));
          int8x16_t high = vreinterpretq_s8_s64(vzip2q_s64(one, two));
#pragma GCC unroll 4
          for (int j = 0; j < 2; j++) {
            int32x4_t sum = vusmmlaq_s32(sums[digit][j][i], pairs[j][0], low);
            sums[digit][j][i] = vusmmlaq_s32(sum, pairs[j][1], high);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 2; i++) {
    int32x4_t combined[2];  // row 0 with vectors 0 and 1, then row 1
#pragma GCC unroll 4
    for (int j = 0; j < 2; j++)
      combined[j] = vaddq_s32(vshlq_n_s32(sums[0][j][i], 8), sums[1][j][i]);
    out[2 * i] = (I32)vuzp1q_s32(combined[0], combined[1]);
    out[2 * i + 1] = (I32)vuzp2q_s32(combined[0], combined[1]);
  }
}
#endif

// M vectors times `count` <= LANES rows from `first` on.
template <bool NIBBLES, bool E2M1, int M>
static void digit_tile(const toast::Product &p, const toast::ExpertBatch &batch,
                       const uint32_t *outputs, const uint8_t *const *at, int64_t first,
                       int count) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout<NIBBLES>::of(m);
  const int64_t blocks = m.group_size / Layout<NIBBLES>::WEIGHTS;
  const bool is_8bit = m.bits == 8;
  // To the next tile, whose rows are read from here if they are not unpacked first.
  const int64_t ahead = M <= 2 && (NIBBLES || is_8bit) ? LANES * row_bytes(m) : 0;
  const char *vectors[M];
  const uint8_t *rows[LANES];
  int64_t numbers[LANES];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    vectors[i] = p.prepared + (p.vector ? p.vector[outputs[i]] : outputs[i]) * p.prepared_stride;
#pragma GCC unroll 4
  for (int j = 0; j < LANES; j++) {  // missing rows repeat the last, and are dropped
    const int row = j < count ? j : count - 1;
    rows[j] = at[row];
    numbers[j] = batch.expert * m.rows + first + row;
  }
  F32 sums[M] = {};
  for (int64_t g = 0; g < layout.groups; g += LANES) {
    F32 scales[LANES], biases[LANES];
    if (M <= 2) prefetch_scales(m, m.scales, numbers, layout.groups, g);
    if (M <= 2 && !E2M1) prefetch_scales(m, m.biases, numbers, layout.groups, g);
    both_by_group<E2M1>(m, numbers, layout.groups, g, scales, biases);
    for (int64_t n = g; n < g + LANES && n < layout.groups; n++) {
      I32 exact[M];
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (M == 4) {
        group_sums_of_four<NIBBLES, E2M1>(vectors, rows, n * blocks, (n + 1) * blocks, exact);
      } else
#endif
        group_sums<NIBBLES, E2M1, M>(vectors, rows, n * blocks, (n + 1) * blocks, ahead, is_8bit,
                                     exact);
#pragma GCC unroll 4
      for (int i = 0; i < M; i++) {
        auto steps = reinterpret_cast<const float *>(vectors[i] + layout.steps);
        auto totals = reinterpret_cast<const float *>(vectors[i] + layout.sums);
        auto int_sums = reinterpret_cast<const int32_t *>(vectors[i] + layout.int_sums);
        exact[i] += sign_correction(int_sums[n], is_8bit);
        const F32 sum = __builtin_convertvector(exact[i], F32);
        sums[i] = multiply_add(sum, scales[n - g] * steps[n], sums[i]);
        sums[i] = multiply_add(biases[n - g], splat(totals[n]), sums[i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    put_some(p.out_type, p.out, outputs[i] * m.rows + first, sums[i], count);
}

template <bool NIBBLES, bool E2M1>
static bool multiply_digits(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  const toast_matrix &m = *p.matrix;
  const bool packed_as_is = NIBBLES || m.bits == 8;
  uint8_t *bytes = nullptr;
  if (!packed_as_is) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, LANES * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += LANES) {
    const uint8_t *rows[LANES];
    const int count = int(end - n < LANES ? end - n : LANES);
    find_rows(m, batch.expert * m.rows + n, count, bytes, rows);
    int64_t i = 0;
    for (; i + MANY <= batch.size; i += MANY)
      digit_tile<NIBBLES, E2M1, MANY>(p, batch, batch.outputs + i, rows, n, count);
    if (MANY > 2 && i + 2 <= batch.size) {
      digit_tile<NIBBLES, E2M1, 2>(p, batch, batch.outputs + i, rows, n, count);
      i += 2;
    }
    if (i < batch.size) digit_tile<NIBBLES, E2M1, 1>(p, batch, batch.outputs + i, rows, n, count);
  }
  return true;
}

static bool multiply_codes(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  if (p.matrix->type == TOAST_E8M0) return multiply_digits<true, true>(p, batch, first, end);
  return p.matrix->bits == 4 ? multiply_digits<true, false>(p, batch, first, end)
                             : multiply_digits<false, false>(p, batch, first, end);
}

}  // namespace

#endif

namespace {

template <bool NIBBLES>
static void prepare_digits(const toast::Product &p, int64_t row) {
  constexpr int PARTS = Layout<NIBBLES>::WEIGHTS / LANES;
  const toast_matrix &m = *p.matrix;
  const toast_vectors &x = *p.x;
  const auto layout = Layout<NIBBLES>::of(m);
  const auto numbers = Numbers::of(p);
  char *out = p.prepared + row * p.prepared_stride;
  auto steps = reinterpret_cast<float *>(out + layout.steps);
  auto sums = reinterpret_cast<float *>(out + layout.sums);
  auto int_sums = reinterpret_cast<int32_t *>(out + layout.int_sums);
  memset(out + layout.steps, 0, layout.bytes - layout.steps);
  char *digits = out;
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t start = row * x.stride + g * m.group_size;
    // Float bits compare as integers: infinity above all finite numbers, NaN above infinity.
    I32 max_bits = {};
    for (int k = 0; k < m.group_size; k += LANES) {
      const I32 size = (I32)floats_at(x.type, x.data, start + k) & 0x7fffffff;
      max_bits = max_bits > size ? max_bits : size;
    }
    int32_t peak = 0, total = 0;
    for (int i = 0; i < LANES; i++) peak = max_bits[i] > peak ? max_bits[i] : peak;
    const auto [step, inverse] = GroupStep::of(peak, numbers.largest);
    I32 totals = {};
    for (int k = 0; k < m.group_size; k += Layout<NIBBLES>::WEIGHTS) {
      I32 v[PARTS];
      for (int i = 0; i < PARTS; i++) {
        const F32 value = floats_at(x.type, x.data, start + k + LANES * i);
        v[i] = inverse ? numbers.rounded(round_to_int(value * inverse)) : I32{};
        totals += v[i];
      }
      store_block<NIBBLES>(numbers, v, digits);
      digits += Layout<NIBBLES>::DIGITS;
    }
    for (int i = 0; i < LANES; i++) total += totals[i];
    steps[g] = step;
    sums[g] = step * float(total);
    int_sums[g] = total;
  }
}

static int64_t prepared_bytes(const toast::Product &p) {
  if (toast::in_floats(p)) return in_float32.prepared_bytes(p);
  return p.matrix->bits == 4 ? Layout<true>::of(*p.matrix).bytes
                             : Layout<false>::of(*p.matrix).bytes;
}

static void prepare(const toast::Product &p, int64_t row) {
  if (toast::in_floats(p)) return in_float32.prepare(p, row);
  return p.matrix->bits == 4 ? prepare_digits<true>(p, row) : prepare_digits<false>(p, row);
}

static bool multiply(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                     int64_t end) {
  if (toast::in_floats(p)) return in_float32.multiply(p, batch, first, end);
  return multiply_codes(p, batch, first, end);
}

}  // namespace
