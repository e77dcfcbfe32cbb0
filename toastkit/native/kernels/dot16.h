// The operations of digits16.h, for ARM, and for AVX2 with AVX-VNNI or without: on 16 bytes of a
// row at a time.
#pragma once

#include "unpack.h"

namespace {

constexpr int ROW_REGISTERS = 4;  // of a tile's LANES rows: of eight, register j holds j and j + 4

typedef int8_t Digits __attribute__((vector_size(16)));

#if defined(__aarch64__)

// Vectors that are multiplied together.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int MANY = 4;
#else
constexpr int MANY = 2;
#endif
const toast::Instructions &in_float32 = toast::neon;

// 16 numbers of eight bits.
INLINE Digits narrowed(const I32 *v) {
  int16x8_t wide[2];
  for (int i = 0; i < 2; i++)
    wide[i] = vcombine_s16(vmovn_s32((int32x4_t)v[2 * i]), vmovn_s32((int32x4_t)v[2 * i + 1]));
  return (Digits)vcombine_s8(vmovn_s16(wide[0]), vmovn_s16(wide[1]));
}

INLINE Digits even(Digits a, Digits b) { return (Digits)vuzp1q_s8((int8x16_t)a, (int8x16_t)b); }
INLINE Digits odd(Digits a, Digits b) { return (Digits)vuzp2q_s8((int8x16_t)a, (int8x16_t)b); }

INLINE I32 load_codes(const uint8_t *const *rows, int64_t at) {
  return (I32)vld1q_u8(rows[0] + at);
}
INLINE I32 load_digits(const int8_t *p) { return (I32)vld1q_s8(p); }
INLINE I32 low_codes(I32 q) { return (I32)vandq_u8((uint8x16_t)q, vdupq_n_u8(15)); }
INLINE I32 high_codes(I32 q) { return (I32)vshrq_n_u8((uint8x16_t)q, 4); }
INLINE I32 e2m1(I32 q) { return (I32)vqtbl1q_u8(vld1q_u8(E2M1_CODES), (uint8x16_t)q); }

// sum += weights . digits, four at a time. dotprod alone has signed bytes only: 8-bit codes have
// 128 subtracted, which sign_correction restores from the sum of v.
INLINE I32 dot(I32 sum, I32 weights, I32 digits, bool is_8bit) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  (void)is_8bit;
  return (I32)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)digits);
#else
  if (is_8bit) weights = (I32)veorq_u8((uint8x16_t)weights, vdupq_n_u8(128));
  return (I32)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)digits);
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

// The sums over each row's lanes; lanes are rows.
INLINE I32 sums_of_rows(const I32 *v) {
  auto pairs = [&](int i) { return vpaddq_s32((int32x4_t)v[i], (int32x4_t)v[i + 1]); };
  return (I32)vpaddq_s32(pairs(0), pairs(2));
}

#else

// 16 numbers of eight bits.
INLINE Digits narrowed(const I32 *v) {
  const __m256i halves = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i wide = _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
  return (Digits)_mm_packs_epi16(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

INLINE __m128i apart(Digits v) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm_shuffle_epi8((__m128i)v, order);
}
INLINE Digits even(Digits a, Digits b) { return (Digits)_mm_unpacklo_epi64(apart(a), apart(b)); }
INLINE Digits odd(Digits a, Digits b) { return (Digits)_mm_unpackhi_epi64(apart(a), apart(b)); }

INLINE I32 load_digits(const int8_t *p) {
  return (I32)_mm256_broadcastsi128_si256(load<__m128i>(p));
}
INLINE I32 low_codes(I32 q) { return q & 0x0f0f0f0f; }
INLINE I32 high_codes(I32 q) { return q >> 4 & 0x0f0f0f0f; }
INLINE I32 e2m1(I32 q) {
  const __m256i codes = _mm256_broadcastsi128_si256(load<__m128i>(E2M1_CODES));
  return (I32)_mm256_shuffle_epi8(codes, (__m256i)q);
}

// The sums over each row's lanes; lanes are rows.
INLINE I32 sums_of_rows(const I32 *v) {
  auto pairs = [&](int i) { return _mm256_hadd_epi32((__m256i)v[i], (__m256i)v[i + 1]); };
  return (I32)_mm256_hadd_epi32(pairs(0), pairs(2));
}

#endif

}  // namespace
