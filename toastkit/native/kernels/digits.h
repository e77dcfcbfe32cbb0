// Quantised weights times 16- or 12-bit activations, on int8 dot products (AVX-512 VNNI): how
// activations are quantised and laid out.
//
// A group of activations is d * v, v int16, as two base-256 digits: upper in [-127, 127], lower in
// [-128, 127]. Half a step of v is 2^-16 of the group's largest magnitude. VPDPBUSD multiplies
// unsigned bytes (weight codes q) by signed bytes (digits) and adds four products to an int32,
// which holds any group's sum: 128 * 255 * 2^15 at most. Integer sums are exact in any order, so
// every kernel here may choose its own and gives the same bits. Then, group by group, each sum
// rounded:
//   y += (scale * d) * (sum of q * v);  y += bias * (d * sum of v).
//
// 4-bit codes lie two to a byte, q + 16 q', and such a byte may be multiplied as it is. Three
// products do the work of four if a pair of activations shares a lower digit, v = 256 u + l, v' =
// 256 u' + 16 l:
//   q v + q' v' = 256 (q u + q' u') + (q + 16 q') l.
// Of l's eight bits, four are those that v' needs and four those of v: both are 12-bit, with an
// error of 8 at most (TOAST_PAIRS).
#pragma once

#include <utility>

#include "unpack.h"

namespace {

constexpr int BLOCK = 64;  // bytes of a row per step
constexpr float MAX_PAIR_DIGITS = 119 * 256;  // 127 - 8: 16 l takes up to 8 of v' upper digit

INLINE bool in_pairs(const toast::Product &p) {
  const bool affine = p.matrix->bits == 4 && p.matrix->type != TOAST_E8M0;
  return affine && p.activation_bits <= TOAST_PAIRS;
}

// A prepared vector: for each block, its upper digits, then its lower ones; then d of each group;
// then d * sum of v of each group. With 2 or 4 codes per byte (as many planes), the digits of a
// group are ordered by plane, lowest bits first, as they meet unpacked codes; 2 bits in groups of
// 32 are one plane. Lower digits of pairs are in the order of bytes.
struct Layout {
  int planes, lanes;  // lanes: 32-bit lanes of a block (or of several) per group
  bool pairs;
  int64_t weights, digits;  // of a block
  int64_t blocks, groups;
  int64_t steps, sums, bytes;  // byte offsets of d and of d * sum of v; of the end
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
    // A cache line of padding, see float_stride.
    l.bytes = l.sums + some + 64;
    return l;
  }
  // Byte offset of the n-th upper digit in storage order; n: a multiple of four.
  int64_t offset(int64_t n) const { return n / weights * digits + n % weights; }
  // From there to its lower digit.
  int64_t lower(int64_t n) const { return pairs ? weights - n % weights / 2 : weights; }
};

// Rounds 16 v to what pairs can represent: the second of each two to a multiple of 16, the first to
// that sixteenth in its low four bits.
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

// Stores the digits of 16 v, whose first is activation `index`.
INLINE void store_digits(const Layout &layout, char *digits, int64_t index, __m512i v) {
  __m512i upper = _mm512_add_epi32(v, _mm512_set1_epi32(128));
  if (layout.pairs) {
    const __m512i lower = _mm512_slli_epi32(_mm512_shuffle_epi32(v, _MM_PERM_CCAA), 24);
    upper = _mm512_mask_sub_epi32(upper, 0xaaaa, v, _mm512_srai_epi32(lower, 20));  // minus 16 l
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
    // Float bits compare as integers: infinity above all finite numbers, NaN above infinity.
    __m512i max_bits = _mm512_setzero_si512();
    for (int k = 0; k < m.group_size; k += LANES) {
      __m512i bits = _mm512_castps_si512((__m512)floats_at(x.type, x.data, start + k));
      max_bits = _mm512_max_epu32(max_bits, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t peak = _mm512_reduce_max_epu32(max_bits);
    const auto [step, inverse] = GroupStep::of(peak, max_value);
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; inverse && k < m.group_size; k += LANES) {
      __m512i v = (__m512i)round_to_int(floats_at(x.type, x.data, start + k) * inverse);
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

// VPDPBUSD: sum += weights (u8) . digits (s8), four at a time.
INLINE void add_dpbusd(I32 &sum, I32 weights, I32 digits) {
  sum = (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
}

// y of 16 rows plus a group, given its integer sums.
INLINE F32 add_group(F32 y, I32 sum, F32 scale, F32 bias, const float *step, const float *total) {
  y = multiply_add(__builtin_convertvector(sum, F32), scale * *step, y);
  return multiply_add(bias, splat(*total), y);
}

// Scales and biases of 16 rows, transposed: scales[i] is that of group g + i of each row; beyond
// the last group zeros, of E8M0 a half (see NO_SCALE). Rows from `count` on repeat the last.
template <int TYPE>
static __attribute__((noinline)) void scales_by_group(const toast_matrix &m, int64_t row,
                                                      int count, int64_t g, F32 *scales,
                                                      F32 *biases) {
  const int64_t groups = m.columns / m.group_size, left = groups - g;
  const __mmask16 valid = __mmask16(left < LANES ? (1u << left) - 1 : 0xffff);
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
      load_transposed(r, [&](int64_t at) { return _mm512_maskz_loadu_ps(valid, numbers + at); });
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) to[i] = (F32)r[i];
    }
  } else if constexpr (TYPE == TOAST_E8M0) {
    auto bytes = static_cast<const uint8_t *>(m.scales);
    const __m128i none = _mm_set1_epi8(NO_SCALE);
    load_transposed(r, [&](int64_t at) {
      return _mm512_cvtepu8_epi32(_mm_mask_loadu_epi8(none, valid, bytes + at));
    });
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      scales[i] = half_e8m0((U32)r[i]);
      biases[i] = scales[i] * E2M1_BIAS;
    }
  } else {  // a scale and its bias are transposed as one 32-bit lane
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
        return _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(valid, from + at));
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
