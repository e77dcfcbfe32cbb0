// GEMV and small batches: 16 rows at a time, dotted in storage order, then reduced across lanes.
#pragma once

#include "digits.h"
#include "prefetch.h"

namespace {

// Unpacks a block of codes to bytes, PLANES registers.
template <int BITS, int PLANES_ = 1>
struct Block {
  static constexpr int PLANES = PLANES_;
  static constexpr int BYTES = BLOCK / 8 * BITS * PLANES;  // as stored
  static constexpr int MAX_CODE = (1 << BITS) - 1;
  static constexpr int DIGITS = BLOCK * PLANES * 2;
  static constexpr bool PAIRED = false;
  // bytes: left in the row.
  INLINE __m512i load(const uint8_t *at, int64_t bytes) {
    const int64_t here = bytes < BYTES ? bytes : BYTES;
    return _mm512_maskz_loadu_epi8(here >= 64 ? ~0ull : (1ull << here) - 1, at);
  }
  INLINE void unpack(__m512i stored, I32 *planes) {
    if constexpr (PLANES > 1) {
#pragma GCC unroll 4
      for (int i = 0; i < PLANES; i++)
        planes[i] = (I32)_mm512_and_si512(_mm512_srli_epi16(stored, BITS * i),
                                          _mm512_set1_epi8((1 << BITS) - 1));
    } else if constexpr (BITS == 8) {
      planes[0] = (I32)stored;
    } else {
#if defined(__AVX512VBMI__)
      // BITS bytes hold eight codes: copy them to each eight bytes, then shift every code to its
      // byte.
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

// Pairs of activations share a lower digit, see digits.h.
struct PairedBlock : Block<4, 2> {
  static constexpr int DIGITS = BLOCK * 3;
  static constexpr bool PAIRED = true;
};

// mxfp4, see E2M1_CODES.
struct E2M1Block : Block<4, 2> {
  static constexpr int MAX_CODE = 24;
  INLINE void unpack(__m512i stored, I32 *planes) {
    const auto table = reinterpret_cast<const __m128i *>(E2M1_CODES);
    const __m512i codes = _mm512_broadcast_i32x4(_mm_load_si128(table));
    Block<4, 2>::unpack(stored, planes);
#pragma GCC unroll 2
    for (int i = 0; i < PLANES; i++)
      planes[i] = (I32)_mm512_shuffle_epi8(codes, (__m512i)planes[i]);
  }
};

// Lane i of each quarter: the horizontal sum of that quarter of a, b, c or d.
INLINE I32 reduce_four_rows(I32 a, I32 b, I32 c, I32 d) {
  auto low = [](I32 a, I32 b) { return (I32)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); };
  auto high = [](I32 a, I32 b) { return (I32)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); };
  const __m512i x = (__m512i)(low(a, b) + high(a, b)), y = (__m512i)(low(c, d) + high(c, d));
  return (I32)_mm512_unpacklo_epi64(x, y) + (I32)_mm512_unpackhi_epi64(x, y);
}

// 256 * upper + lower of two rows, partially reduced: each quarter holds two sums of lane pairs of
// a, then two of b. The sums must fit into int16.
INLINE I32 reduce_two_rows(I32 upper_a, I32 lower_a, I32 upper_b, I32 lower_b) {
  auto words = [](I32 a, I32 b) { return _mm512_packs_epi32((__m512i)a, (__m512i)b); };
  const __m512i lower = words(lower_a, lower_b), one = _mm512_set1_epi16(1);
  const __m512i sums = _mm512_dpwssd_epi32(_mm512_setzero_si512(), lower, one);
  return (I32)_mm512_dpwssd_epi32(sums, words(upper_a, upper_b), _mm512_set1_epi16(256));
}

// VSHUFPS: in each quarter two lanes of a, then two of b.
template <int WHICH>
INLINE I32 shuffle_words(I32 a, I32 b) {
  return (I32)_mm512_shuffle_ps((__m512)a, (__m512)b, WHICH);
}

// As above, from reduce_two_rows.
INLINE I32 reduce_four_rows(I32 ab, I32 cd) {
  return shuffle_words<0x88>(ab, cd) + shuffle_words<0xdd>(ab, cd);
}

// r: four rows each; out[g]: the sums of group g of 16 rows.
template <int QUARTERS>  // per group: 1, 2 or 4
INLINE void reduce_by_group(const I32 *r, I32 *out) {
  if constexpr (QUARTERS == 1) {
    I32 a = quarters<0x44>(r[0], r[1]), b = quarters<0xee>(r[0], r[1]);
    I32 c = quarters<0x44>(r[2], r[3]), d = quarters<0xee>(r[2], r[3]);
    out[0] = quarters<0x88>(a, c), out[1] = quarters<0xdd>(a, c);
    out[2] = quarters<0x88>(b, d), out[3] = quarters<0xdd>(b, d);
  } else if constexpr (QUARTERS == 2) {
    I32 x = quarters<0x88>(r[0], r[1]) + quarters<0xdd>(r[0], r[1]);
    I32 y = quarters<0x88>(r[2], r[3]) + quarters<0xdd>(r[2], r[3]);
    out[0] = quarters<0x88>(x, y), out[1] = quarters<0xdd>(x, y);
  } else {
    out[0] = sums_of_quarters(r);
  }
}

// Prefetches the next rows while these are multiplied, some bytes per step: all requests at once
// would stall the loads. non_temporal: into L1, and not into L2 when it leaves L1.
struct Prefetcher {
  const uint8_t *at;
  int64_t pace;
  // For so many steps.
  inline __attribute__((always_inline)) void fetch(int64_t steps, bool non_temporal = false) {
    const uint8_t *end = at + steps * pace;
    for (; at < end; at += 64) {
      if (non_temporal) {
        _mm_prefetch(reinterpret_cast<const char *>(at), _MM_HINT_NTA);
      } else {
        prefetch(at);
      }
    }
    at = end;
  }
  // One line, when `loaded` is first used: otherwise the compiler would issue all prefetches at
  // once, and load twice.
  inline __attribute__((always_inline)) void fetch_line(__m512i &loaded, bool non_temporal) {
    if (non_temporal) {
      asm volatile("prefetchnta %1" : "+v"(loaded) : "m"(*at));
    } else {
      asm volatile("prefetcht1 %1" : "+v"(loaded) : "m"(*at));
    }
    at += 64;
  }
};

// Prefetches scales and biases from `row` on, `pace` groups per step.
struct ScalePrefetcher {
  Prefetcher scales, biases;
  INLINE ScalePrefetcher of(const toast_matrix &m, int64_t row, int64_t pace) {
    const int64_t size = toast_type_bytes(m.type);
    const int64_t from = row * (m.columns / m.group_size) * size;
    return {{static_cast<const uint8_t *>(m.scales) + from, pace * size},
            {m.biases ? static_cast<const uint8_t *>(m.biases) + from : nullptr,
             m.biases ? pace * size : 0}};
  }
  inline __attribute__((always_inline)) void fetch(bool non_temporal = false) {
    scales.fetch(1, non_temporal), biases.fetch(1, non_temporal);
  }
};

// Upper and lower digits of block b, and of the following blocks of its group, as unpacked planes
// meet them: v[plane][upper or lower]. Pairs have one lower register.
template <class B, int GROUP_LANES>
INLINE void load_digits(const char *digits, int64_t b, I32 (*v)[2]) {
  constexpr int COUNT = B::PLANES * (GROUP_LANES > 16 ? GROUP_LANES / 16 : 1);
  constexpr int BLOCK_WEIGHTS = BLOCK * B::PLANES;
  if constexpr (B::PAIRED) v[0][1] = load<I32>(digits + b * B::DIGITS + BLOCK_WEIGHTS);
#pragma GCC unroll 2
  for (int part = 0; part < (B::PAIRED ? 1 : 2); part++) {
    I32 r[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++)
      r[i] = load<I32>(digits + (b + i / B::PLANES) * B::DIGITS + part * BLOCK_WEIGHTS +
                       i % B::PLANES * BLOCK);
    if constexpr (B::PLANES == 4 && GROUP_LANES == 4) {  // group-major to plane-major
      I32 planes[4];
      reduce_by_group<1>(r, planes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) r[i] = planes[i];
    } else if constexpr (B::PLANES > 1 && GROUP_LANES < 16) {
      constexpr int FIRST = GROUP_LANES == 8 ? 0x44 : 0x88, SECOND = GROUP_LANES == 8 ? 0xee : 0xdd;
      constexpr int HALF = COUNT / 2;
#pragma GCC unroll 2
      for (int i = 0; i < HALF; i++) {
        v[2 * i][part] = quarters<FIRST>(r[i], r[i + HALF]);
        v[2 * i + 1][part] = quarters<SECOND>(r[i], r[i + HALF]);
      }
      continue;
    }
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) v[i][part] = r[i];
  }
}

// Copies BYTES of each row, zero-padded; left: bytes of a row that exist.
template <int BYTES>
static __attribute__((noinline)) void copy_padded(const uint8_t *rows, int64_t stride, int count,
                                                  int64_t left, uint8_t *out) {
  memset(out, 0, 16 * BYTES);
  for (int j = 0; j < count; j++)
    memcpy(out + j * BYTES, rows + j * stride, left < BYTES ? left : BYTES);
}

// y of M vectors and `count` <= 16 rows in blocks B. GROUP_LANES: see Layout::lanes. next: address
// of the rows to prefetch; next_row: their index in the stack.
template <class B, int GROUP_LANES, int M>
static void digit_rows(const toast::Product &p, const uint32_t *outputs, const uint8_t *rows,
                       int64_t stride, int64_t expert, int64_t first, int count,
                       const uint8_t *next, int64_t next_row) {
  constexpr int PLANES = B::PLANES, BLOCKS = GROUP_LANES > 16 ? GROUP_LANES / 16 : 1;
  constexpr int GROUPS = GROUP_LANES > 16 ? 1 : 16 / GROUP_LANES;  // per step of BLOCKS blocks
  constexpr int BLOCK_WEIGHTS = BLOCK * PLANES, BYTES = B::BYTES * BLOCKS;
  // Whether the sums of a step fit into int16, and registers suffice.
  constexpr bool FITS_INT16 =
      M == 1 && !B::PAIRED && 4 * PLANES * BLOCKS * B::MAX_CODE * 128 <= 0x7fff;
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(p);
  const char *digits[M];
  for (int i = 0; i < M; i++) digits[i] = digits_of(p, outputs[i]);
  F32 y[M] = {}, scales[16], biases[16];
  const int64_t row = expert * m.rows + first;
  const int64_t row_bytes_left = m.columns * B::BYTES / BLOCK_WEIGHTS;
  constexpr int ROWS = B::BYTES > 32 ? 1 : B::BYTES > 16 ? 2 : 4;  // rows per prefetched line
  alignas(64) uint8_t copy[16 * BYTES + 64];
  const bool non_temporal = toast::is_zen5;
  Prefetcher ahead = {next, BYTES};
  asm("" : "+r"(ahead.pace));  // were it a known constant, GCC would issue all prefetches at once
  auto next_scales = ScalePrefetcher::of(m, next_row, 16 * GROUPS);
  int64_t g = 0;
  for (int64_t b = 0; b < layout.blocks; b += BLOCKS, g += GROUPS) {
    if (g % 16 == 0) scales_by_group(m, row, count, g, scales, biases);
    next_scales.fetch(non_temporal);
    I32 v[M][PLANES * BLOCKS][2], reduced[M][4], out[4];
#pragma GCC unroll 4
    for (int n = 0; n < M; n++) load_digits<B, GROUP_LANES>(digits[n], b, v[n]);
    const uint8_t *from = rows + b * B::BYTES;
    int64_t pitch = stride;
    if (count < 16 || row_bytes_left - b * B::BYTES < BYTES - B::BYTES + 64) {
      copy_padded<BYTES>(from, stride, count, row_bytes_left - b * B::BYTES, copy);
      from = copy, pitch = BYTES;
    }
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++, from += 4 * pitch) {
      I32 sums[M][2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        I32 q[BLOCKS][PLANES];
        __m512i stored;
#pragma GCC unroll 2
        for (int i = 0; i < BLOCKS; i++) {
          stored = load<__m512i>(from + j * pitch + i * B::BYTES);
          if constexpr (B::BYTES == 64) ahead.fetch_line(stored, non_temporal);
          B::unpack(stored, q[i]);
        }
        if (B::BYTES < 64 && j % ROWS == 0) ahead.fetch(ROWS, non_temporal);
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
          I32 sum = {};
#pragma GCC unroll 2
          for (int part = 0; part < 2; part++) {
            if (part) sum = FITS_INT16 ? I32{} : sum * 256;
            if (part && B::PAIRED) {
              add_dpbusd(sum, (I32)stored, v[n][0][1]);
            } else
#pragma GCC unroll 4
            for (int k = 0; k < PLANES * BLOCKS; k++)
              add_dpbusd(sum, q[k / PLANES][k % PLANES], v[n][k][part]);
            sums[n][part][j] = sum;
          }
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < M; n++) {
        const I32 *upper = sums[n][0], *all = sums[n][1];
        if constexpr (FITS_INT16) {
          reduced[n][four] = reduce_four_rows(reduce_two_rows(upper[0], all[0], upper[1], all[1]),
                                              reduce_two_rows(upper[2], all[2], upper[3], all[3]));
        } else {
          reduced[n][four] = reduce_four_rows(all[0], all[1], all[2], all[3]);
        }
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < M; n++) {
      auto steps = reinterpret_cast<const float *>(digits[n] + layout.steps) + g;
      auto sums = reinterpret_cast<const float *>(digits[n] + layout.sums) + g;
      reduce_by_group<(GROUP_LANES > 16 ? 16 : GROUP_LANES) / 4>(reduced[n], out);
#pragma GCC unroll 4
      for (int i = 0; i < GROUPS; i++)  // missing groups have zero scales
        y[n] = add_group(y[n], out[i], scales[g % 16 + i], biases[g % 16 + i], steps + i, sums + i);
    }
  }
  for (int n = 0; n < M; n++) store_rows(p, outputs[n], first, count, y[n]);
}

}  // namespace
