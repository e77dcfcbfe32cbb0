// Vectorised exp, softplus, sin and cos, to within a few units in the last place.
#pragma once

#include <math.h>

#include "lanes.h"

namespace {

typedef int32_t I32 __attribute__((vector_size(4 * LANES)));
typedef double F64 __attribute__((vector_size(8 * LANES)));
typedef int64_t I64 __attribute__((vector_size(8 * LANES)));

INLINE float horizontal_max(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float part[LANES];
  store(part, v);
  for (int i = 1; i < LANES; i++)
    if (part[i] > part[0]) part[0] = part[i];
  return part[0];
}

// The least number whose exponential is no less than 2^-126, the smallest normal number, and the
// largest whose exponential is finite.
constexpr float LEAST_EXPONENT = -0x1.5d589ep6f, MOST_EXPONENT = 0x1.62e42ep6f;

// NaN stays NaN. 0 in place of a subnormal number, and not by the arithmetic: Intel's processors
// take over a hundred clocks where a result is subnormal, and as many wherever it is used.
INLINE F32 exponential(F32 x) {
  constexpr float MAGIC = 0x1.8p23f;  // adding it rounds to an integer, which are the low bits
#if defined(__AVX512F__)
  x = minimum(splat(100.0f), x);  // infinity from there on; keeps NaN
  const auto underflows = x < splat(LEAST_EXPONENT);
  x = underflows ? F32{} : x;
#endif
  F32 rounded = multiply_add(x, splat(0x1.715476p0f), splat(MAGIC));
  F32 n = rounded - MAGIC;
  F32 r = multiply_add(n, splat(-0x1.63p-1f), x);  // Cody-Waite: n * these few digits is exact
  r = multiply_add(n, splat(0x1.bd0106p-13f), r);
  F32 p = multiply_add(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));  // Cephes
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  const F32 y = (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
  return underflows ? F32{} : y;
#else
  F32 y = (F32)((U32)p + ((U32)rounded << 23));  // times 2^n, as both are normal
  y = x <= splat(MOST_EXPONENT) ? y : x + INFINITY;
  return x < splat(LEAST_EXPONENT) ? F32{} : y;
#endif
}

// log(1 + exp(x)): with z = exp(-|x|) <= 1, log(1 + z) = 2 artanh(z / (2 + z)).
INLINE F32 softplus(F32 x) {
  const auto positive = x > F32{};
  const F32 z = exponential(positive ? -x : x), s = z / (z + 2.0f), square = s * s;
  F32 p = multiply_add(square, splat(1.0f / 15), splat(1.0f / 13));  // s <= 1 / 3
  p = multiply_add(p, square, splat(1.0f / 11));
  p = multiply_add(p, square, splat(1.0f / 9));
  p = multiply_add(p, square, splat(1.0f / 7));
  p = multiply_add(p, square, splat(1.0f / 5));
  p = multiply_add(p, square, splat(1.0f / 3));
  const F32 more = multiply_add(p * square, s + s, s + s);
  return positive ? x + more : more;
}

struct SinCos {
  F32 sin, cos;
};

// Angles in radians below MAX_ANGLE. Reduced in float64, where n * QUARTER is exact for these.
constexpr float MAX_ANGLE = 0x1p20f;
INLINE SinCos sin_cos(F32 angle) {
  constexpr double MAGIC = 0x1.8p52;
  constexpr double QUARTER = 0x1.921fb544p0, REST = 0x1.0b4611a626331p-34;  // sum: pi / 2
  F64 x = __builtin_convertvector(angle, F64);
  F64 rounded = x * 0x1.45f306dc9c883p-1 + MAGIC;
  F64 n = rounded - MAGIC;
  F32 r = __builtin_convertvector(x - n * QUARTER - n * REST, F32), s = r * r;
  I32 quarter = __builtin_convertvector((I64)rounded, I32);  // quadrant, in the low bits
  F32 sin = multiply_add(s, splat(-1.9515295891e-4f), splat(8.3321608736e-3f));  // Cephes
  sin = multiply_add(sin, s, splat(-1.6666654611e-1f));
  sin = multiply_add(sin * s, r, r);
  F32 cos = multiply_add(s, splat(2.443315711809948e-5f), splat(-1.388731625493765e-3f));
  cos = multiply_add(cos, s, splat(4.166664568298827e-2f));
  cos = multiply_add(cos * s, s, multiply_add(s, splat(-0.5f), splat(1.0f)));
  const I32 odd = (quarter & 1) != 0;
  SinCos t = {odd ? cos : sin, odd ? sin : cos};
  t.sin = (F32)((I32)t.sin ^ (quarter & 2) << 30);
  t.cos = (F32)((I32)t.cos ^ ((quarter + 1) & 2) << 30);
  return t;
}

}  // namespace
