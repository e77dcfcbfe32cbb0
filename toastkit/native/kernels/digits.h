// Products of packed weights with activations in 16 bits, for processors that multiply bytes.
//
// A group of activations is d * v, v whole numbers of 16 bits: two digits in base 256, the upper
// from -127 to 127, the lower from -128 to 127. The processor multiplies unsigned bytes (numbers of
// packed weights) by signed ones (digits) and adds up four at a time in 32 bits, which never
// overflow here: 8 * 15 * 2^15 with two numbers a byte, 4 * 255 * 2^15 with one. Half the unit of v
// is 2^-16 of the largest of its group.
#pragma once

#include "floats.h"

namespace {

constexpr int BLOCK_BYTES = 64;
constexpr float LARGEST = 127 * 256 + 127;
constexpr float LEAST = 0x1p-100f;  // a group without anything larger is zeros
constexpr int AHEAD = 4096;         // bytes that are fetched before they are multiplied

// What a vector is prepared as. Of each block of numbers, 128 that lie two in a byte or 64, the
// digits: upper and lower (first the even numbers' and then the odd ones', as they lie in bytes);
// then d for each of a block's 16 sums of bytes; then d times the sum of v for each group.
template <bool NIBBLES>
struct Layout {
  static constexpr int NUMBERS = NIBBLES ? 2 * BLOCK_BYTES : BLOCK_BYTES;
  static constexpr int DIGITS = 2 * NUMBERS;
  int64_t blocks, groups, steps, sums, bytes;
  INLINE Layout of(const toast_matrix &m) {
    Layout l;
    l.blocks = (m.columns + NUMBERS - 1) / NUMBERS;
    l.groups = m.columns / m.group_size;
    l.steps = l.blocks * DIGITS;
    l.sums = l.steps + l.blocks * LANES * int64_t(sizeof(float));
    // As in floats.h, one cache line more.
    l.bytes = l.sums + (l.groups + LANES - 1) / LANES * 64 + 64;
    return l;
  }
};

INLINE __mmask16 first_lanes(int64_t n) { return n >= LANES ? 0xffff : (1u << n) - 1; }

// Sixteen v into their places.
template <bool NIBBLES>
INLINE void put_digits(char *digits, int64_t number, __m512i v) {
  __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
  __m128i parts[2] = {_mm512_cvtepi32_epi8(upper), _mm512_cvtepi32_epi8(v)};  // v - upper * 256
  constexpr int NUMBERS = Layout<NIBBLES>::NUMBERS;
  char *block = digits + number / NUMBERS * Layout<NIBBLES>::DIGITS;
  int64_t place = number % NUMBERS;
  for (int part = 0; part < 2; part++, block += NUMBERS) {
    if (!NIBBLES) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(block + place), parts[part]);
      continue;
    }
    const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m128i both = _mm_shuffle_epi8(parts[part], apart);
    _mm_storel_epi64(reinterpret_cast<__m128i *>(block + place / 2), both);
    _mm_storel_epi64(reinterpret_cast<__m128i *>(block + BLOCK_BYTES + place / 2),
                     _mm_unpackhi_epi64(both, both));
  }
}

template <bool NIBBLES>
static void prepare_digits(const toast::Product &p, int64_t row) {
  const toast_matrix &m = *p.matrix;
  const toast_vectors &x = *p.x;
  const auto layout = Layout<NIBBLES>::of(m);
  char *out = p.prepared + row * p.prepared_stride;
  memset(out, 0, layout.bytes);
  auto steps = reinterpret_cast<float *>(out + layout.steps);
  auto sums = reinterpret_cast<float *>(out + layout.sums);
  constexpr int A_SUM = Layout<NIBBLES>::NUMBERS / LANES;  // numbers
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t start = row * x.stride + g * m.group_size;
    // Compared as whole numbers: there, infinity is above all others and NaN above it.
    __m512i most = _mm512_setzero_si512();
    for (int k = 0; k < m.group_size; k += LANES) {
      __m512i bits = _mm512_castps_si512((__m512)numbers_at(x.type, x.data, start + k));
      most = _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t peak = _mm512_reduce_max_epu32(most);
    float step = of_bits(peak) / LARGEST, per_step = LARGEST / of_bits(peak);
    if (peak >= 0x7f800000) step = of_bits(0x7fc00000);
    if (peak >= 0x7f800000 || of_bits(peak) < LEAST) per_step = 0;
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; per_step && k < m.group_size; k += LANES) {
      __m512 value = (__m512)numbers_at(x.type, x.data, start + k);
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(per_step)));
      total = _mm512_add_epi32(total, v);
      put_digits<NIBBLES>(out, g * m.group_size + k, v);
    }
    sums[g] = step * float(_mm512_reduce_add_epi32(total));
    for (int64_t k = 0; k < m.group_size; k += A_SUM)
      steps[(g * m.group_size + k) / A_SUM] = step;
  }
}

// The results of M members and N rows, which are from `first` on in the stack of all experts.
template <bool NIBBLES, int M, int N>
static void digit_tile(const toast::Product &p, const uint32_t *places,
                       const uint8_t *const *rows, int64_t expert, int64_t first) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout<NIBBLES>::of(m);
  const int shift = __builtin_ctz(m.group_size);
  constexpr int NUMBERS = Layout<NIBBLES>::NUMBERS, A_SUM = NUMBERS / LANES;
  const int64_t bytes = NIBBLES ? m.columns / 2 : m.columns, row = expert * m.rows + first;
  const char *vectors[M];
  for (int i = 0; i < M; i++)
    vectors[i] = p.prepared + (p.vector ? p.vector[places[i]] : places[i]) * p.prepared_stride;
  const __m512i low = _mm512_set1_epi8(15), lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                                     10, 11, 12, 13, 14, 15);
  const __m512i group_of = _mm512_srli_epi32(
      _mm512_mullo_epi32(lanes, _mm512_set1_epi32(A_SUM)), shift);
  __m512 sums[M][N];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) sums[i][j] = _mm512_setzero_ps();
  for (int64_t g = 0; g < layout.groups; g += LANES) {  // the scales of 16 groups at a time
    const int some = int(layout.groups - g);
    __m512 scales[N];
    for (int j = 0; j < N; j++) {
      const int64_t at = (row + j) * layout.groups + g;
      scales[j] = (__m512)some_numbers_at(m.type, m.scales, at, some);
      __m512 bias = (__m512)some_numbers_at(m.type, m.biases, at, some);
      for (int i = 0; i < M; i++) {
        __m512 x = _mm512_loadu_ps(vectors[i] + layout.sums + g * 4);
        sums[i][j] = _mm512_fmadd_ps(bias, x, sums[i][j]);
      }
    }
    const int64_t begin = (g << shift) / NUMBERS, after = ((g + LANES) << shift) / NUMBERS;
    for (int64_t b = begin; b < after && b < layout.blocks; b++) {
      const __m512i which = _mm512_add_epi32(
          group_of, _mm512_set1_epi32(int(((b - begin) * NUMBERS) >> shift)));
      const int64_t here = bytes - b * BLOCK_BYTES;
      const __mmask64 mask = here >= BLOCK_BYTES ? ~0ull : (1ull << here) - 1;
      __m512i even[N], odd[N];
      __m512 scale[N];
      for (int j = 0; j < N; j++) {
        const uint8_t *at = rows[j] + b * BLOCK_BYTES;
        __m512i q = _mm512_maskz_loadu_epi8(mask, at);
        if (M == 1) _mm_prefetch(reinterpret_cast<const char *>(at) + AHEAD, _MM_HINT_T0);
        even[j] = NIBBLES ? _mm512_and_si512(q, low) : q;
        odd[j] = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
        scale[j] = _mm512_permutexvar_ps(which, scales[j]);
      }
      for (int i = 0; i < M; i++) {
        const char *digits = vectors[i] + b * Layout<NIBBLES>::DIGITS;
        const __m512 step = _mm512_loadu_ps(vectors[i] + layout.steps + b * BLOCK_BYTES);
        for (int j = 0; j < N; j++) {
          __m512i s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even[j],
                                          _mm512_loadu_si512(digits));
          if (NIBBLES) s = _mm512_dpbusd_epi32(s, odd[j], _mm512_loadu_si512(digits + BLOCK_BYTES));
          s = _mm512_slli_epi32(s, 8);
          s = _mm512_dpbusd_epi32(s, even[j], _mm512_loadu_si512(digits + NUMBERS));
          if (NIBBLES)
            s = _mm512_dpbusd_epi32(s, odd[j],
                                    _mm512_loadu_si512(digits + NUMBERS + BLOCK_BYTES));
          sums[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s), _mm512_mul_ps(step, scale[j]),
                                       sums[i][j]);
        }
      }
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      put(p.out_type, p.out, places[i] * m.rows + first + j, sum((F32)sums[i][j]));
}

// M members with all rows that are at hand.
template <bool NIBBLES, int M>
static void digit_tiles(const toast::Product &p, const toast::Group &group, int64_t i,
                        const uint8_t *const *rows, int64_t first, int count) {
  int n = 0;
  for (; n + 2 <= count; n += 2)
    digit_tile<NIBBLES, M, 2>(p, group.places + i, rows + n, group.expert, first + n);
  if (n < count) digit_tile<NIBBLES, M, 1>(p, group.places + i, rows + n, group.expert, first + n);
}

template <bool NIBBLES>
static bool multiply_digits(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end) {
  constexpr int TILE = 8;
  const toast_matrix &m = *p.matrix;
  const bool stored = NIBBLES || m.bits == 8;
  uint8_t *bytes = nullptr;
  if (!stored) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, MOST_ROWS * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += MOST_ROWS) {
    const uint8_t *rows[MOST_ROWS];
    const int count = int(end - n < MOST_ROWS ? end - n : MOST_ROWS);
    for (int j = 0; j < count; j++) {
      rows[j] = row_at(m, group.expert * m.rows + n + j);
      if (!stored) {
        unpack_bytes(m, rows[j], bytes + j * m.columns);
        rows[j] = bytes + j * m.columns;
      }
    }
    int64_t i = 0;
    for (; i + TILE <= group.members; i += TILE)
      digit_tiles<NIBBLES, TILE>(p, group, i, rows, n, count);
    for (; i + 2 <= group.members; i += 2) digit_tiles<NIBBLES, 2>(p, group, i, rows, n, count);
    if (i < group.members) digit_tiles<NIBBLES, 1>(p, group, i, rows, n, count);
  }
  return true;
}

}  // namespace
