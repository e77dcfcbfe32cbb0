// Products of packed weights with activations in 16 or 12 bits, for processors that multiply bytes:
// what a vector becomes.
//
// A group of activations is d * v, v whole numbers of 16 bits: two digits in base 256, the upper
// from -127 to 127, the lower from -128 to 127. Half the unit of v is 2^-16 of the largest of its
// group. The processor multiplies unsigned bytes (numbers of packed weights) by signed ones
// (digits) and adds up four at a time in 32 bits, which hold what a group adds up to: 128 * 255 *
// 2^15 at most. Whole numbers add up to the same in any order: so those below may each take them
// as it likes. Then a result is, one group after another and each sum rounded,
//   y += (scale * d) * (sum of q * v);  y += bias * (d * sum of v).
//
// Numbers of 4 bits lie two in a byte, and that byte, q + 16 q', may be multiplied as it is: three
// products do for four where both share a lower digit, v = 256 u + l and v' = 256 u' + 16 l:
//   q v + q' v' = 256 (q u + q' u') + (q + 16 q') l.
// Of l's eight bits four are what v' needs, and four what v does: both have 12 bits, and are off by
// 8 at most.
#pragma once

#include <utility>

#include "unpack.h"

namespace {

constexpr int BLOCK = 64;  // bytes of a row that are multiplied at a time
constexpr float MAX_DIGITS = 127 * 256 + 127;
constexpr float MAX_PAIR_DIGITS = 119 * 256;  // 16 l takes eight of v' upper digits
constexpr float MIN_PEAK = 0x1p-100f;         // a group without anything larger is zeros

INLINE bool in_pairs(const toast::Product &p) {
  const bool whole = p.matrix->bits == 4 && p.matrix->type != TOAST_E8M0;
  return whole && p.activation_bits <= TOAST_PAIRS;
}

// What a vector is prepared as: of each block of numbers, its upper digits and then its lower ones;
// then d of each group; then d times the sum of v. Of numbers that lie two or four in a byte (so
// many planes), a group's digits are first those of the lowest bits and at last those of the
// highest; 2 bits in groups of 32 are one plane. Lower digits of pairs are as the bytes are.
struct Layout {
  int planes, lanes;  // lanes: 32 bits of a block, or of more than one, that belong to a group
  bool pairs;
  int64_t weights, digits, blocks, groups, steps, sums, bytes;  // numbers, digits: of a block
  INLINE Layout of(const toast::Product &p) {
    const toast_matrix &m = *p.matrix;
    Layout l;
    l.planes = m.bits == 4 ? 2 : m.bits == 2 && m.group_size > 32 ? 4 : 1;
    l.lanes = m.group_size / 4 / l.planes;
    l.pairs = in_pairs(p);
    l.weights = BLOCK * l.planes;
    l.digits = l.pairs ? l.weights + BLOCK : l.weights * 2;
    l.blocks = (m.columns + l.weights - 1) / l.weights;
    l.groups = m.columns / m.group_size;
    const int64_t some = (l.groups + LANES - 1) / LANES * 64;
    l.steps = l.blocks * l.digits;
    l.sums = l.steps + some;
    // As in floats.h, one cache line more.
    l.bytes = l.sums + some + 64;
    return l;
  }
  // Where the n-th upper digit lies, as they lie; n: a multiple of four.
  int64_t offset(int64_t n) const { return n / weights * digits + n % weights; }
  // From there to the lower one.
  int64_t lower(int64_t n) const { return pairs ? weights - n % weights / 2 : weights; }
};

// Sixteen v as pairs can have them: of each two the second a multiple of 16, the first, in its
// lowest four bits, that many.
INLINE __m512i round_to_pairs(__m512i v) {
  const __m512i eight = _mm512_set1_epi32(8), fifteen = _mm512_set1_epi32(15);
  auto sixteens = [&](__m512i n) {
    return _mm512_andnot_si512(fifteen, _mm512_add_epi32(n, eight));
  };
  const __m512i second = sixteens(v), other = _mm512_shuffle_epi32(second, _MM_PERM_CDAB);
  const __m512i low = _mm512_and_si512(_mm512_srli_epi32(other, 4), fifteen);
  const __m512i first = _mm512_add_epi32(sixteens(_mm512_sub_epi32(v, low)), low);
  return _mm512_mask_blend_epi32(0xaaaa, first, second);
}

// Sixteen v into their places.
INLINE void store_digits(const Layout &layout, char *digits, int64_t index, __m512i v) {
  __m512i upper = _mm512_add_epi32(v, _mm512_set1_epi32(128));
  if (layout.pairs) {
    const __m512i lower = _mm512_slli_epi32(_mm512_shuffle_epi32(v, _MM_PERM_CCAA), 24);
    upper = _mm512_mask_sub_epi32(upper, 0xaaaa, v, _mm512_srai_epi32(lower, 20));  // 16 l
  }
  upper = _mm512_srai_epi32(upper, 8);
  __m128i parts[2] = {_mm512_cvtepi32_epi8(upper), _mm512_cvtepi32_epi8(v)};  // v - upper * 256
  char *block = digits + index / layout.weights * layout.digits;
  const int64_t in_block = index % layout.weights, plane = layout.lanes * 4;  // a power of two
  const int64_t in_group = in_block & (plane * layout.planes - 1);
  const int64_t first = in_block - in_group + in_group / layout.planes;
  for (int part = 0; part < 2; part++, block += layout.weights) {
    if (layout.planes == 1) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(block + in_block), parts[part]);
    } else if (layout.planes == 2) {
      const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
      __m128i both = _mm_shuffle_epi8(parts[part], apart);
      if (part && layout.pairs) {
        _mm_storel_epi64(reinterpret_cast<__m128i *>(block + in_block / 2), both);
        return;
      }
      _mm_storel_epi64(reinterpret_cast<__m128i *>(block + first), both);
      _mm_storel_epi64(reinterpret_cast<__m128i *>(block + first + plane),
                       _mm_unpackhi_epi64(both, both));
    } else {
      const __m128i apart = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      alignas(16) int32_t fours[4];
      _mm_store_si128(reinterpret_cast<__m128i *>(fours), _mm_shuffle_epi8(parts[part], apart));
      for (int i = 0; i < 4; i++) memcpy(block + first + i * plane, fours + i, 4);
    }
  }
}

static void prepare_digits(const toast::Product &p, int64_t row) {
  const toast_matrix &m = *p.matrix;
  const toast_vectors &x = *p.x;
  const auto layout = Layout::of(p);
  char *out = p.prepared + row * p.prepared_stride;
  memset(out, 0, layout.bytes);
  const float max_value = layout.pairs ? MAX_PAIR_DIGITS : MAX_DIGITS;
  auto steps = reinterpret_cast<float *>(out + layout.steps);
  auto sums = reinterpret_cast<float *>(out + layout.sums);
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t start = row * x.stride + g * m.group_size;
    // Compared as whole numbers: there, infinity is above all others and NaN above it.
    __m512i max_bits = _mm512_setzero_si512();
    for (int k = 0; k < m.group_size; k += LANES) {
      __m512i bits = _mm512_castps_si512((__m512)floats_at(x.type, x.data, start + k));
      max_bits = _mm512_max_epu32(max_bits, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t peak = _mm512_reduce_max_epu32(max_bits);
    float step = of_bits(peak) / max_value, inverse_step = max_value / of_bits(peak);
    if (peak >= 0x7f800000) step = of_bits(0x7fc00000);
    if (peak >= 0x7f800000 || of_bits(peak) < MIN_PEAK) inverse_step = 0;
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; inverse_step && k < m.group_size; k += LANES) {
      __m512 value = (__m512)floats_at(x.type, x.data, start + k);
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(inverse_step)));
      if (layout.pairs) v = round_to_pairs(v);
      total = _mm512_add_epi32(total, v);
      store_digits(layout, out, g * m.group_size + k, v);
    }
    steps[g] = step;
    sums[g] = step * float(_mm512_reduce_add_epi32(total));
  }
}

INLINE const char *digits_of(const toast::Product &p, uint32_t output) {
  return p.prepared + (p.vector ? p.vector[output] : output) * p.prepared_stride;
}

// Adds up products of unsigned bytes and signed ones, four at a time.
INLINE void add_dpbusd(I32 &sum, I32 weights, I32 digits) {
  sum = (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
}

// What y, of 16 rows, becomes with the next group, whose sums these are.
INLINE F32 add_group(F32 y, I32 sum, F32 scale, F32 bias, const float *step, const float *total) {
  y = multiply_add(__builtin_convertvector(sum, F32), scale * *step, y);
  return multiply_add(bias, splat(*total), y);
}

// Scales and biases of 16 rows, of groups from g on: the i-th are group g + i's, of groups that are
// not there zeros. Rows from `count` on are the last one again.
template <int TYPE>
static __attribute__((noinline)) void scales_by_group(const toast_matrix &m, int64_t row,
                                                      int count, int64_t g, F32 *scales,
                                                      F32 *biases) {
  const int64_t groups = m.columns / m.group_size, left = groups - g;
  const __mmask16 there = __mmask16(left < LANES ? (1u << left) - 1 : 0xffff);
  auto load_transposed = [&](I32 *r, auto &&at) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++)
      r[j] = (I32)at((row + (j < count ? j : count - 1)) * groups + g);
    transpose(r);
  };
  I32 r[16];
  if constexpr (TYPE == TOAST_F32) {
    for (auto [from, to] : {std::pair(m.scales, scales), std::pair(m.biases, biases)}) {
      auto numbers = static_cast<const float *>(from);
      load_transposed(r, [&](int64_t at) { return _mm512_maskz_loadu_ps(there, numbers + at); });
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) to[i] = (F32)r[i];
    }
  } else if constexpr (TYPE == TOAST_E8M0) {
    auto bytes = static_cast<const uint8_t *>(m.scales);
    load_transposed(r, [&](int64_t at) {
      return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, bytes + at));
    });
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      scales[i] = half_e8m0((U32)r[i]);
      biases[i] = scales[i] * E2M1_BIAS;
    }
  } else {  // a scale and its bias are brought crosswise as one number of 32 bits
    alignas(64) static constexpr struct Interleave {
      uint16_t at[32];
      constexpr Interleave() : at() {
        for (int i = 0; i < 32; i++) at[i] = uint16_t(i / 2 + i % 2 * 32);
      }
    } interleave;
    auto low = static_cast<const uint16_t *>(m.scales);
    auto high = static_cast<const uint16_t *>(m.biases);
    load_transposed(r, [&](int64_t at) {
      auto both = [&](const uint16_t *from) {
        return _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(there, from + at));
      };
      return _mm512_permutex2var_epi16(both(low), _mm512_load_si512(interleave.at), both(high));
    });
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      scales[i] = Dtype<TYPE>::template part<0>((F32)r[i]);
      biases[i] = Dtype<TYPE>::template part<1>((F32)r[i]);
    }
  }
}

INLINE void scales_by_group(const toast_matrix &m, int64_t row, int count, int64_t g, F32 *scales,
                            F32 *biases) {
  switch (m.type) {
    case TOAST_F32: return scales_by_group<TOAST_F32>(m, row, count, g, scales, biases);
    case TOAST_F16: return scales_by_group<TOAST_F16>(m, row, count, g, scales, biases);
    case TOAST_BF16: return scales_by_group<TOAST_BF16>(m, row, count, g, scales, biases);
    default: return scales_by_group<TOAST_E8M0>(m, row, count, g, scales, biases);
  }
}

INLINE void store_rows(const toast::Product &p, uint32_t output, int64_t first, int count, F32 y) {
  const int64_t at = output * p.matrix->rows + first;
  if (p.out_type == TOAST_F32) {
    const __mmask16 some = __mmask16((1u << count) - 1);
    _mm512_mask_storeu_ps(static_cast<float *>(p.out) + at, some, (__m512)y);
    return;
  }
  for (int j = 0; j < count; j++) put(p.out_type, p.out, at + j, y[j]);
}

}  // namespace
