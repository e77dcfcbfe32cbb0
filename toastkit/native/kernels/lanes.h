// SIMD over LANES elements, a register's worth, in GCC vector types: one source for all instruction
// sets. Everything is inlined and has internal linkage, as the same functions are compiled once per
// instruction set.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * LANES)));
// GCC keeps arrays of these in registers, but not of the intrinsics' types, which may alias any
// other.
typedef int32_t I32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t U32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t U16 __attribute__((vector_size(2 * LANES)));
typedef uint8_t U8 __attribute__((vector_size(LANES)));
typedef int8_t I8 __attribute__((vector_size(LANES)));

template <class Vector>
INLINE Vector load(const void *p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector>
INLINE void store(void *p, Vector v) {
  memcpy(p, &v, sizeof v);
}

template <class Vector, class Number>
INLINE Vector load_some(const Number *p, int n, Number fill = 0) {  // n <= LANES, then `fill`
  Vector v = Vector{} + fill;
#if defined(__aarch64__)  // a memcpy call would spill all accumulators
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i++)
    if (i < n) v[i] = p[i];
#else
  memcpy(&v, p, n * sizeof *p);
#endif
  return v;
}

// A broadcast. x - 0 is x for every x, so it costs nothing, while -0 + 0 would be +0.
INLINE F32 splat(float x) { return x - F32{}; }

// Fused (one rounding) where the processor has FMA, by -ffp-contract=fast. Explicit on ARM: GCC
// contracts only within a basic block, which the branches of load_some split.
INLINE F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b if either is NaN, as the x86 instructions do it, which GCC does not find for 512 bits.
INLINE F32 maximum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

INLINE F32 minimum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

#if defined(__AVX2__) || defined(__aarch64__)
INLINE I32 round_to_int(F32 v) {  // half to even
#if defined(__AVX512F__)
  return (I32)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32((__m256)v);
#else
  return (I32)vcvtnq_s32_f32((float32x4_t)v);
#endif
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE __m128i as_words(I32 v) {  // saturated
  const __m256i all = (__m256i)v;
  return _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#endif

INLINE float horizontal_sum(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__aarch64__)  // the order of the loop below, in registers
  const float32x2_t half = vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v));
  return vget_lane_f32(half, 0) + vget_lane_f32(half, 1);
#elif defined(__AVX2__)  // likewise
  const __m256 all = (__m256)v;
  const __m128 half = _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1);
  const __m128 pair = half + _mm_movehl_ps(half, half);
  return pair[0] + pair[1];
#else
  float part[LANES];
  store(part, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
#endif
}

INLINE U32 widened(U16 v) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, U32);
#endif
}

INLINE F32 from_u8(const uint8_t *p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load<__m128i>(p)));
#elif defined(__AVX2__)
  return (F32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__aarch64__)
  const uint16x8_t wide = vmovl_u8(vcreate_u8(load<uint32_t>(p)));
  return (F32)vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
#else
  return F32{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
#endif
}

INLINE F32 from_i8(I8 v) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v));
#elif defined(__AVX2__)
  return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&v)));
#else
  return __builtin_convertvector(v, F32);
#endif
}

INLINE F32 from_bf16(U16 v) { return (F32)(widened(v) << 16); }

INLINE F32 from_f16(U16 v) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps((__m256i)v);
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps((__m128i)v);
#elif defined(__aarch64__)
  return (F32)vcvt_f32_f16((float16x4_t)v);
#else
  U32 bits = widened(v), size = (bits & 0x7fff) << 13;
  U32 scaled = (U32)((F32)size * 0x1p112f);          // exact, for subnormals too
  scaled |= (U32)(size >= 0x0f800000) & 0x7f800000;  // infinity and NaN
  return (F32)(scaled | (bits & 0x8000) << 16);
#endif
}

// Loads of a type as float32; TOAST_I8 without its scale.
template <int TYPE>
struct Dtype {
  static constexpr int SIZE = TYPE == TOAST_F32 ? 4 : TYPE == TOAST_I8 ? 1 : 2;
  INLINE F32 at(const void *p, int64_t i) {
    if constexpr (TYPE == TOAST_F32) return load<F32>(static_cast<const float *>(p) + i);
    if constexpr (TYPE == TOAST_I8) return from_i8(load<I8>(static_cast<const int8_t *>(p) + i));
    return wide(load<U16>(static_cast<const uint16_t *>(p) + i));
  }
  INLINE F32 some(const void *p, int64_t i, int n) {
    if constexpr (TYPE == TOAST_F32)
      return load_some<F32>(static_cast<const float *>(p) + i, n);
    if constexpr (TYPE == TOAST_I8)
      return from_i8(load_some<I8>(static_cast<const int8_t *>(p) + i, n));
    return wide(load_some<U16>(static_cast<const uint16_t *>(p) + i, n));
  }
  INLINE F32 wide(U16 v) {
    if constexpr (TYPE == TOAST_F16) return from_f16(v);
    return from_bf16(v);
  }
  // Element INDEX of those packed in each 32-bit lane.
  template <int INDEX>
  INLINE F32 part(F32 v) {
    if constexpr (TYPE == TOAST_F32) return v;
    if constexpr (TYPE == TOAST_I8) {
      const I32 bytes = (I32)v << (24 - 8 * INDEX) >> 24;
      return __builtin_convertvector(bytes, F32);
    }
    if constexpr (TYPE == TOAST_F16) return from_f16(narrow((U32)v >> 16 * INDEX));
    return (F32)(INDEX ? (U32)v & 0xffff0000 : (U32)v << 16);
  }
  INLINE U16 narrow(U32 v) { return __builtin_convertvector(v, U16); }
};

// Bytes of a row of `size` elements, with the scale of TOAST_I8.
template <int TYPE>
INLINE int64_t row_bytes(int64_t size) {
  return size * Dtype<TYPE>::SIZE + (TYPE == TOAST_I8 ? int64_t(sizeof(float)) : 0);
}

INLINE float scale_of(const void *row, int64_t size) {
  return load<float>(static_cast<const char *>(row) + size);
}

INLINE F32 floats_at(int type, const void *p, int64_t i) {
  if (type == TOAST_F32) return Dtype<TOAST_F32>::at(p, i);
  return type == TOAST_F16 ? Dtype<TOAST_F16>::at(p, i) : Dtype<TOAST_BF16>::at(p, i);
}

INLINE F32 some_floats_at(int type, const void *p, int64_t i, int n) {
  if (n >= LANES) return floats_at(type, p, i);
  if (type == TOAST_F32) return Dtype<TOAST_F32>::some(p, i, n);
  return type == TOAST_F16 ? Dtype<TOAST_F16>::some(p, i, n)
                           : Dtype<TOAST_BF16>::some(p, i, n);
}

// Up to LANES elements of a row, from d on, zero-padded; TOAST_I8 with its scale.
INLINE F32 floats_of_row(int type, const void *row, int64_t size, int64_t d) {
  const int n = int(size - d < LANES ? size - d : LANES);
  if (type != TOAST_I8) return some_floats_at(type, row, d, n);
  return (n < LANES ? Dtype<TOAST_I8>::some(row, d, n) : Dtype<TOAST_I8>::at(row, d)) *
         scale_of(row, size);
}

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Round to nearest, ties to even.
INLINE uint16_t to_bf16(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_f16(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more
  if (size < 0x38800000)  // subnormal halves have the spacing of floats at 0.5
    return uint16_t(sign | (bits_of(of_bits(size) + 0.5f) - bits_of(0.5f)));
  return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

INLINE void put(int type, void *p, int64_t i, float x) {
  if (type == TOAST_F32) {
    static_cast<float *>(p)[i] = x;
  } else {
    static_cast<uint16_t *>(p)[i] = type == TOAST_F16 ? to_f16(x) : to_bf16(x);
  }
}

// To 16 bits, rounded likewise.
INLINE U16 narrowed(int type, F32 v) {
  if (type == TOAST_BF16) {
    U32 bits = (U32)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector(v == v ? rounded : bits >> 16 | 0x40, U16);
  }
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (U16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  U16 narrow;
  for (int k = 0; k < LANES; k++) narrow[k] = to_f16(v[k]);
  return narrow;
#endif
}

// Stores the first n elements.
INLINE void put_some(int type, void *p, int64_t i, F32 v, int n) {
  if (type == TOAST_F32) {
    float *to = static_cast<float *>(p) + i;
    if (n >= LANES) return store(to, v);
    memcpy(to, &v, n * sizeof *to);
  } else {
    uint16_t *to = static_cast<uint16_t *>(p) + i;
    U16 narrow = narrowed(type, v);
    if (n >= LANES) return store(to, narrow);
    memcpy(to, &narrow, n * sizeof *to);
  }
}

#if defined(__AVX512F__)
// Two 128-bit quarters of a, then two of b, as selected by the constant.
template <int WHICH>
INLINE I32 quarters(I32 a, I32 b) {
  return (I32)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, WHICH);
}

// Transposes 4 x 4 blocks of 32 bits: within each quarter of four registers.
template <class Vector>
INLINE void transpose_quarters(Vector *r) {
  auto low = [&](int i) { return _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]); };
  auto high = [&](int i) { return _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]); };
  const __m512i a = low(0), b = high(0), c = low(2), d = high(2);
  r[0] = (Vector)_mm512_unpacklo_epi64(a, c), r[1] = (Vector)_mm512_unpackhi_epi64(a, c);
  r[2] = (Vector)_mm512_unpacklo_epi64(b, d), r[3] = (Vector)_mm512_unpackhi_epi64(b, d);
}

// Horizontal sums of quarters: quarter i of the result is the sum of the quarters of r[i].
INLINE I32 sums_of_quarters(const I32 *r) {
  const I32 x = quarters<0x88>(r[0], r[1]) + quarters<0xdd>(r[0], r[1]);
  const I32 y = quarters<0x88>(r[2], r[3]) + quarters<0xdd>(r[2], r[3]);
  return quarters<0x88>(x, y) + quarters<0xdd>(x, y);
}

// Transposes 8 x 8 blocks of 32 bits: within each half of eight registers.
INLINE void transpose_halves(F32 *r) {
  transpose_quarters(r), transpose_quarters(r + 4);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = (__m512i)r[i], b = (__m512i)r[i + 4];
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    r[i] = (F32)_mm512_permutex2var_epi64(a, low, b);
    r[i + 4] = (F32)_mm512_permutex2var_epi64(a, high, b);
  }
}

// Transposes LANES registers of 32-bit lanes.
template <class Vector>
INLINE void transpose(Vector *r) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) transpose_quarters(r + i);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    I32 a = quarters<0x44>((I32)r[i], (I32)r[i + 4]), b = quarters<0xee>((I32)r[i], (I32)r[i + 4]);
    I32 c = quarters<0x44>((I32)r[i + 8], (I32)r[i + 12]);
    I32 d = quarters<0xee>((I32)r[i + 8], (I32)r[i + 12]);
    r[i] = (Vector)quarters<0x88>(a, c), r[i + 4] = (Vector)quarters<0xdd>(a, c);
    r[i + 8] = (Vector)quarters<0x88>(b, d), r[i + 12] = (Vector)quarters<0xdd>(b, d);
  }
}
#else
INLINE void transpose(F32 *r) {
#if defined(__AVX2__)
  __m256 t[8], u[8];
  auto pd = [](__m256 v) { return _mm256_castps_pd(v); };
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(pd(t[i + j]), pd(t[i + j + 2])));
      u[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pd(t[i + j]), pd(t[i + j + 2])));
    }
#pragma GCC unroll 8
  for (int c = 0; c < 4; c++) {
    r[c] = (F32)_mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = (F32)_mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
#else
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++)
#pragma GCC unroll 8
    for (int j = 0; j < i; j++) {
      float one = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = one;
    }
#endif
}
#endif

}  // namespace
