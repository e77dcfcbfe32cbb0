// Dequantisation of weights: packed codes to bytes, and rows to float32. And the steps that groups
// of activations are quantised with.
#pragma once

#include "lanes.h"
#include "product.h"

namespace {

// Bytes per stored row.
INLINE int64_t row_bytes(const toast_matrix &m) {
  return m.bits ? m.columns * m.bits / 8 : m.columns * toast_type_bytes(m.type);
}

INLINE const uint8_t *row_at(const toast_matrix &m, int64_t row) {
  return static_cast<const uint8_t *>(m.weight) + row * row_bytes(m);
}

#if defined(__AVX2__)
// unpack_bits of 2 or 4, 32 codes at a time: PDEP takes twice as long, on Zen 2 far longer.
template <int BITS>
INLINE void unpack_few_bits(const uint8_t *packed, int64_t columns, uint8_t *out) {
  const __m128i mask = _mm_set1_epi8((1 << BITS) - 1);
  for (int64_t k = 0; k < columns; k += 32, packed += 4 * BITS, out += 32) {
    const __m128i from = BITS == 4 ? load<__m128i>(packed)
                                   : _mm_loadl_epi64(reinterpret_cast<const __m128i *>(packed));
    auto at = [&](int bit) { return _mm_and_si128(_mm_srli_epi16(from, bit), mask); };
    __m128i low, high;
    if constexpr (BITS == 4) {
      low = _mm_unpacklo_epi8(at(0), at(4)), high = _mm_unpackhi_epi8(at(0), at(4));
    } else {
      const __m128i a = _mm_unpacklo_epi8(at(0), at(2)), b = _mm_unpacklo_epi8(at(4), at(6));
      low = _mm_unpacklo_epi16(a, b), high = _mm_unpackhi_epi16(a, b);
    }
    store(out, low), store(out + 16, high);
  }
}
#endif

// A packed row is a little-endian bit string, the first code in the lowest bits: eight codes fill
// BITS bytes. columns: a multiple of 32.
template <int BITS>
INLINE void unpack_bits(const uint8_t *packed, int64_t columns, uint8_t *out) {
#if defined(__AVX2__)
  if constexpr (BITS == 2 || BITS == 4) return unpack_few_bits<BITS>(packed, columns, out);
#endif
  constexpr uint64_t ONES = 0x0101010101010101u * ((1u << BITS) - 1);
  for (int64_t k = 0; k < columns; k += 8, packed += BITS, out += 8) {
    uint64_t bits = 0, bytes = 0;
    if ((columns - k) * BITS >= 64) {  // bits beyond the eight codes are masked below
      memcpy(&bits, packed, 8);
    } else {
      memcpy(&bits, packed, BITS);
    }
#if defined(__BMI2__)
    bytes = _pdep_u64(bits, ONES);
#else
    for (int i = 0; i < 8; i++) bytes |= (bits >> i * BITS) << i * 8 & ONES & 0xffull << i * 8;
#endif
    memcpy(out, &bytes, 8);
  }
}

// E2M1 codes become twice their value plus 12: integers from 0 on, which makes mxfp4 an affine
// quantisation with half the scale and a bias of -12 such scales.
alignas(16) constexpr uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                12, 11, 10, 9,  8,  6,  4,  0};
constexpr float E2M1_BIAS = -12;

INLINE void decode_e2m1(uint8_t *bytes, int64_t columns) {
#if defined(__AVX2__)
  const __m256i codes = _mm256_broadcastsi128_si256(load<__m128i>(E2M1_CODES));
  for (int64_t k = 0; k < columns; k += 32)
    store(bytes + k, _mm256_shuffle_epi8(codes, load<__m256i>(bytes + k)));
#elif defined(__aarch64__)
  for (int64_t k = 0; k < columns; k += 16)
    vst1q_u8(bytes + k, vqtbl1q_u8(vld1q_u8(E2M1_CODES), vld1q_u8(bytes + k)));
#else
  for (int64_t k = 0; k < columns; k++) bytes[k] = E2M1_CODES[bytes[k]];
#endif
}

// A packed row to a byte per code. columns: a multiple of 32.
INLINE void unpack_bytes(const toast_matrix &m, const uint8_t *row, uint8_t *out) {
  switch (m.bits) {
    case 2: return unpack_bits<2>(row, m.columns, out);
    case 3: return unpack_bits<3>(row, m.columns, out);
    case 4:
      unpack_bits<4>(row, m.columns, out);
      return m.type == TOAST_E8M0 ? decode_e2m1(out, m.columns) : void();
    case 5: return unpack_bits<5>(row, m.columns, out);
    case 6: return unpack_bits<6>(row, m.columns, out);
    default: memcpy(out, row, m.columns);
  }
}

// 2^(e - 127) / 2. Exponent 0 is subnormal and 255 is NaN: both need the same extra bit.
INLINE F32 half_e8m0(U32 e) {
  return (F32)(e << 23 | ((U32)((e == 0) | (e == 255)) & 0x400000)) * 0.5f;
}

// The E8M0 scale of a group that there is not: 1. 0 is 2^-127, and operations with its half, which
// is subnormal, take Intel's processors over a hundred clocks each.
constexpr uint8_t NO_SCALE = 127;

// Group scales or biases at [at, at + n), padded with zeros; half of E8M0 scales, with NO_SCALE.
INLINE F32 scales_at(const toast_matrix &m, const void *numbers, int64_t at, int n) {
  if (m.type != TOAST_E8M0) return some_floats_at(m.type, numbers, at, n);
  auto from = static_cast<const uint8_t *>(numbers) + at;
  U8 bytes = load_some<U8>(from, n < LANES ? n : LANES, NO_SCALE);
  return half_e8m0(__builtin_convertvector(bytes, U32));
}

// Those of group `at`, in all lanes.
INLINE void scale_and_bias(const toast_matrix &m, int64_t at, F32 &scale, F32 &bias) {
  scale = splat(scales_at(m, m.scales, at, 1)[0]), bias = scale * E2M1_BIAS;
  if (m.type != TOAST_E8M0) bias = splat(scales_at(m, m.biases, at, 1)[0]);
}

constexpr float MAX_DIGITS = 127 * 256 + 127;
constexpr float MIN_PEAK = 0x1p-100f;  // groups whose largest magnitude is below become zeros

// Of a group of activations, whose largest magnitude has the bits `peak` and becomes `largest`. The
// inverse is 0 if all become zeros; a group with infinity or NaN has NaN for a step.
struct GroupStep {
  float step, inverse;
  INLINE GroupStep of(uint32_t peak, float largest) {
    const bool finite = peak < 0x7f800000;
    return {finite ? of_bits(peak) / largest : of_bits(0x7fc00000),
            finite && of_bits(peak) >= MIN_PEAK ? largest / of_bits(peak) : 0};
  }
};

// Where `count` rows from `row` on are. bytes: (count, columns), to unpack them to, or NULL.
INLINE void find_rows(const toast_matrix &m, int64_t row, int count, uint8_t *bytes,
                      const uint8_t **rows) {
  for (int j = 0; j < count; j++) {
    rows[j] = row_at(m, row + j);
    if (!bytes) continue;
    unpack_bytes(m, rows[j], bytes + j * m.columns);
    rows[j] = bytes + j * m.columns;
  }
}

// Dequantises a row to float32, zero-padded to a multiple of LANES. bytes: scratch, (columns).
INLINE void dequantise_weights(const toast_matrix &m, int64_t row, uint8_t *bytes, float *out) {
  const uint8_t *from = row_at(m, row);
  if (!m.bits) {
    for (int64_t k = 0; k < m.columns; k += LANES)
      store(out + k, some_floats_at(m.type, from, k, int(m.columns - k)));
    return;
  }
  unpack_bytes(m, from, bytes);
  const int64_t groups = m.columns / m.group_size;
  for (int64_t g = 0; g < groups; g++) {
    F32 scale, bias;
    scale_and_bias(m, row * groups + g, scale, bias);
    for (int64_t k = g * m.group_size; k < (g + 1) * m.group_size; k += LANES)
      store(out + k, multiply_add(from_u8(bytes + k), scale, bias));
  }
}

}  // namespace
