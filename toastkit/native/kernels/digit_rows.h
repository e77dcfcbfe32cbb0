// Few vectors: 16 rows at a time, as they lie in memory, whose sums are brought crosswise.
#pragma once

#include "digits.h"

namespace {

// The numbers of a block, a byte each: of its planes, which are `PLANES`.
template <int BITS>
struct Block {
  static constexpr int PLANES = BITS == 4 ? 2 : 1;
  static constexpr int BYTES = BITS == 4 ? BLOCK : BLOCK / 8 * BITS;  // as they are stored
  // bytes: what is left of the row.
  INLINE __m512i load(const uint8_t *at, int64_t bytes) {
    const int64_t here = bytes < BYTES ? bytes : BYTES;
    return _mm512_maskz_loadu_epi8(here >= 64 ? ~0ull : (1ull << here) - 1, at);
  }
  INLINE void spread(__m512i stored, I32 *planes) {
    const __m512i low = _mm512_set1_epi8(15);
    if constexpr (BITS == 4) {
      planes[0] = (I32)_mm512_and_si512(stored, low);
      planes[1] = (I32)_mm512_and_si512(_mm512_srli_epi16(stored, 4), low);
    } else if constexpr (BITS == 8) {
      planes[0] = (I32)stored;
    } else {
#if defined(__AVX512VBMI__)
      // Eight numbers are BITS bytes: these go to eight bytes, and each byte takes its bits there.
      constexpr int B = BITS;
      alignas(64) static constexpr struct Bytes {
        uint8_t at[64];
        constexpr Bytes() : at() {
          for (int i = 0; i < 64; i++) at[i] = uint8_t(i / 8 * B + (i % 8 < B ? i % 8 : 0));
        }
      } bytes;
      constexpr uint64_t SHIFTS = uint64_t(B) * 0x0706050403020100ull;
      const __m512i eight = _mm512_permutexvar_epi8(_mm512_load_si512(bytes.at), stored);
      planes[0] = (I32)_mm512_and_si512(
          _mm512_multishift_epi64_epi8(_mm512_set1_epi64(SHIFTS), eight),
          _mm512_set1_epi8((1 << BITS) - 1));
#endif
    }
  }
};

// Numbers of E2M1, as unpack.h has them.
struct Doubled : Block<4> {
  INLINE void spread(__m512i stored, I32 *planes) {
    const auto table = reinterpret_cast<const __m128i *>(DOUBLED);
    const __m512i doubled = _mm512_broadcast_i32x4(_mm_load_si128(table));
    Block<4>::spread(stored, planes);
#pragma GCC unroll 2
    for (int i = 0; i < PLANES; i++)
      planes[i] = (I32)_mm512_shuffle_epi8(doubled, (__m512i)planes[i]);
  }
};

// Of four rows: each quarter holds what its lanes add up to in row a, b, c, d.
INLINE I32 four_rows(I32 a, I32 b, I32 c, I32 d) {
  auto low = [](I32 a, I32 b) { return (I32)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); };
  auto high = [](I32 a, I32 b) { return (I32)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); };
  const __m512i x = (__m512i)(low(a, b) + high(a, b)), y = (__m512i)(low(c, d) + high(c, d));
  return (I32)_mm512_unpacklo_epi64(x, y) + (I32)_mm512_unpackhi_epi64(x, y);
}

// r: of four rows each; out[g]: what the lanes of group g add up to in 16 rows.
template <int QUARTERS>  // of a group: 1, 2 or 4
INLINE void by_group(const I32 *r, I32 *out) {
  if constexpr (QUARTERS == 1) {
    I32 a = quarters<0x44>(r[0], r[1]), b = quarters<0xee>(r[0], r[1]);
    I32 c = quarters<0x44>(r[2], r[3]), d = quarters<0xee>(r[2], r[3]);
    out[0] = quarters<0x88>(a, c), out[1] = quarters<0xdd>(a, c);
    out[2] = quarters<0x88>(b, d), out[3] = quarters<0xdd>(b, d);
  } else {
    I32 x = quarters<0x88>(r[0], r[1]) + quarters<0xdd>(r[0], r[1]);
    I32 y = quarters<0x88>(r[2], r[3]) + quarters<0xdd>(r[2], r[3]);
    out[0] = quarters<0x88>(x, y), out[1] = quarters<0xdd>(x, y);
    if constexpr (QUARTERS == 4) out[0] += out[1];
  }
}

// What comes after the rows that are multiplied, fetched meanwhile, some bytes a step: requests
// that come all at once would hold up what is at work.
struct Coming {
  const uint8_t *at;
  int64_t pace;
  // That of so many steps.
  inline __attribute__((always_inline)) void fetch(int64_t steps) {
    const uint8_t *end = at + steps * pace;
    for (; at < end; at += 64) _mm_prefetch(reinterpret_cast<const char *>(at), _MM_HINT_T1);
    at = end;
  }
};

// Scales and biases of so many rows, as many as one group has: those of all groups, when g has
// passed through them.
INLINE void fetch_numbers(const toast_matrix &m, int64_t row, int64_t rows, int64_t g) {
  const int64_t size = m.type == TOAST_F32 ? 4 : m.type == TOAST_E8M0 ? 1 : 2;
  const int64_t from = (row * (m.columns / m.group_size) + g * rows) * size;
  for (int64_t at = from; at < from + rows * size; at += 64) {
    _mm_prefetch(static_cast<const char *>(m.scales) + at, _MM_HINT_T1);
    if (m.biases) _mm_prefetch(static_cast<const char *>(m.biases) + at, _MM_HINT_T1);
  }
}

// The results of one member and `count` rows, 16 at most, of numbers in blocks B. LANES_: of a
// group (see Layout). ahead: of the rows that come after these, what is fetched meanwhile;
// row_ahead: which of the stack they are.
template <class B, int LANES_>
static void digit_rows(const toast::Product &p, uint32_t place, const uint8_t *rows,
                       int64_t stride, int64_t expert, int64_t first, int count,
                       Coming ahead, int64_t row_ahead) {
  constexpr int PLANES = B::PLANES, BLOCKS = LANES_ > 16 ? LANES_ / 16 : 1;
  constexpr int GROUPS = LANES_ > 16 ? 1 : 16 / LANES_;  // of a step of so many blocks
  constexpr int NUMBERS = BLOCK * PLANES;
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(m);
  const char *digits = digits_of(p, place);
  auto steps = reinterpret_cast<const float *>(digits + layout.steps);
  auto sums = reinterpret_cast<const float *>(digits + layout.sums);
  const uint8_t *at[16];
  for (int j = 0; j < 16; j++) at[j] = rows + (j < count ? j : count - 1) * stride;
  F32 y = {}, scales[16], biases[16];
  const int64_t row = expert * m.rows + first;
  const int64_t most = m.columns * B::BYTES / NUMBERS;
  int64_t g = 0;
  for (int64_t b = 0; b < layout.blocks; b += BLOCKS, g += GROUPS) {
    if (g % 16 == 0) numbers_by_group(m, row, count, g, scales, biases);
    fetch_numbers(m, row_ahead, 16 * GROUPS, g / GROUPS);
    I32 v[PLANES * BLOCKS][2], fours[4], out[4];
#pragma GCC unroll 8
    for (int i = 0; i < PLANES * BLOCKS; i++) {
      const char *from = digits + (b + i / PLANES) * 2 * NUMBERS + i % PLANES * BLOCK;
      v[i][0] = load<I32>(from), v[i][1] = load<I32>(from + NUMBERS);
    }
    if constexpr (PLANES == 2 && LANES_ < 16) {  // halves of groups, of one plane after another
      constexpr int EVEN = LANES_ == 8 ? 0x44 : 0x88, ODD = LANES_ == 8 ? 0xee : 0xdd;
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const I32 first = v[0][part], second = v[1][part];
        v[0][part] = quarters<EVEN>(first, second), v[1][part] = quarters<ODD>(first, second);
      }
    }
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      I32 s[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        I32 q[BLOCKS][PLANES];
        s[j] = I32{};
#pragma GCC unroll 2
        for (int i = 0; i < BLOCKS; i++) {
          const int64_t here = (b + i) * B::BYTES;
          B::spread(B::load(at[four * 4 + j] + here, most - here), q[i]);
          ahead.fetch(1);
#pragma GCC unroll 2
          for (int k = 0; k < PLANES; k++)
            add_fours(s[j], q[i][k], v[i * PLANES + k][0]);
        }
        s[j] *= 256;
#pragma GCC unroll 2
        for (int i = 0; i < BLOCKS; i++)
#pragma GCC unroll 2
          for (int k = 0; k < PLANES; k++)
            add_fours(s[j], q[i][k], v[i * PLANES + k][1]);
      }
      fours[four] = four_rows(s[0], s[1], s[2], s[3]);
    }
    by_group<(LANES_ > 16 ? 16 : LANES_) / 4>(fours, out);
#pragma GCC unroll 4
    for (int i = 0; i < GROUPS; i++)
      y = add_group(y, out[i], scales[g % 16 + i], biases[g % 16 + i], steps + g + i,
                    sums + g + i);  // of groups that are not there: zeros
  }
  put_sixteen(p, place, first, count, y);
}

}  // namespace
