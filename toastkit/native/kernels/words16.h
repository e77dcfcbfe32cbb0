// What digits16.h needs on AVX2, where products of bytes saturate, and on AVX-VNNI, which adds up
// as it multiplies. Words are multiplied by words, VPMADDWD or VPDPWSSD: activations stay as they
// are, codes are widened. Sums are the same.
//
// Of 4-bit codes, two lie in a byte, q + 16 q'. Where 12 bits are enough, their activations share a
// digit of 7 bits, v = 128 u + l, v' = 128 u' + 16 l, so that
//   q v + q' v' = 128 (q u + q' u') + (q + 16 q') l,
// products of bytes that do not saturate, and fewer (see digits.h). v is then a multiple of 8, give
// or take the low three bits of l, and v' one of 16, which leaves it 11 bits. One vector meets
// weights so; several are multiplied as words, which gives the same.
#include <algorithm>
#include <type_traits>

namespace {

constexpr int FEW_WORDS = 4;  // vectors that meet rows as these are stored
constexpr int UNIT = 16;      // bytes that are loaded of a row, of which BYTES count

// How codes are packed: CODES of a row in BYTES, widened eight at a time, which PARTS are.
template <int BITS>
struct Packing {
  static constexpr bool E2M1 = false;
  static constexpr int CODES = BITS <= 3 ? 32 : 16, BYTES = CODES * BITS / 8, PARTS = CODES / 8;
  // Two bytes hold all of a code: they are shifted up, then down.
  INLINE I32 widened(I32 q, int part) {
    alignas(32) static constexpr struct Places {
      int8_t bytes[32];
      int16_t factors[16];
      constexpr Places() : bytes(), factors() {
        for (int i = 0; i < 16; i++) {
          const int bit = i % 8 * BITS;
          bytes[2 * i] = int8_t(bit / 8), bytes[2 * i + 1] = int8_t(bit / 8 + 1);
          factors[i] = int16_t(1 << (16 - BITS - bit % 8));
        }
      }
    } places;
    const __m256i start = _mm256_set1_epi8(int8_t(BITS * part));
    const __m256i order = _mm256_add_epi8(load<__m256i>(places.bytes), start);
    const __m256i two = _mm256_shuffle_epi8((__m256i)q, order);
    const __m256i up = _mm256_mullo_epi16(two, load<__m256i>(places.factors));
    return (I32)_mm256_srli_epi16(up, 16 - BITS);
  }
};

template <>
struct Packing<8> {
  static constexpr bool E2M1 = false;
  static constexpr int CODES = 16, BYTES = 16, PARTS = 2;
  INLINE I32 widened(I32 q, int part) {
    const __m256i none = _mm256_setzero_si256();
    return part ? (I32)_mm256_unpackhi_epi8((__m256i)q, none)
                : (I32)_mm256_unpacklo_epi8((__m256i)q, none);
  }
};

// A word holds four: first all numbers that meet the lowest of a word, then those of the next.
template <>
struct Packing<4> {
  static constexpr bool E2M1 = false;
  static constexpr int CODES = 32, BYTES = 16, PARTS = 4;
  INLINE I32 widened(I32 q, int part) {
    const __m256i down = _mm256_srli_epi16((__m256i)q, 4 * part);
    return part == 3 ? (I32)down : (I32)down & 0xf000f;
  }
  // Puts a unit's numbers in that order.
  INLINE void reorder(__m128i *words) {
    const __m128i fours = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (int i = 0; i < 4; i++) words[i] = _mm_shuffle_epi8(words[i], fours);
    __m128i low[2], high[2];
    for (int i = 0; i < 2; i++) {
      low[i] = _mm_unpacklo_epi32(words[2 * i], words[2 * i + 1]);
      high[i] = _mm_unpackhi_epi32(words[2 * i], words[2 * i + 1]);
    }
    auto pair = [&](const __m128i *from, __m128i *to) {
      to[0] = _mm_unpacklo_epi64(from[0], from[1]), to[1] = _mm_unpackhi_epi64(from[0], from[1]);
    };
    pair(low, words), pair(high, words + 2);
  }
};

struct PackedE2M1 : Packing<4> {
  static constexpr bool E2M1 = true;
  INLINE I32 widened(I32 q, int part) {
    q = e2m1(part % 2 ? high_codes(q) : low_codes(q));
    return part / 2 ? (I32)_mm256_srli_epi16((__m256i)q, 8) : q & 0xff00ff;
  }
};

// Bytes as they are, and the digits of two activations that share one: see shares_digits.
struct PackedPairs : Packing<4> {};

constexpr float MAX_SHARED = 119 * 128;  // 127 - 8: 16 l takes up to 8 of v' upper digit

INLINE bool shares_digits(const toast::Product &p) {
  const bool affine = p.matrix->bits == 4 && p.matrix->type != TOAST_E8M0;
  return affine && p.activation_bits <= TOAST_PAIRS;
}

INLINE bool is_stored_in_digits(const toast::Product &p) {
  return shares_digits(p) && p.x->count == 1;
}

INLINE I32 of_odd_lanes(I32 v) { return (I32)_mm256_shuffle_epi32((__m256i)v, 0xf5); }
INLINE I32 of_even_lanes(I32 v) { return (I32)_mm256_shuffle_epi32((__m256i)v, 0xa0); }
INLINE I32 alternate(I32 even, I32 odd) {
  return (I32)_mm256_blend_epi32((__m256i)even, (__m256i)odd, 0xaa);
}

// The numbers v of a prepared vector. shared: as digits that are shared represent them.
struct Numbers {
  float largest;
  bool shared, in_digits;
  INLINE Numbers of(const toast::Product &p) {
    const bool shared = shares_digits(p);
    return {shared ? MAX_SHARED : MAX_DIGITS, shared, is_stored_in_digits(p)};
  }
  // Shared digits: the second of each two to a multiple of 16, the first to one of 8, plus the low
  // three bits of that sixteenth.
  I32 rounded(I32 v) const {
    if (!shared) return v;
    const I32 sixteenth = (v + 8) >> 4, low = of_odd_lanes(sixteenth) & 7;
    return alternate(((v - low + 4) & ~7) + low, sixteenth << 4);
  }
};

// The digits of 32 numbers: upper ones of even columns, of odd ones, shared ones.
INLINE void store_digits(const I32 *v, char *out) {
  I32 upper[4], lower[4];
  for (int i = 0; i < 4; i++) {
    lower[i] = of_even_lanes(((v[i] + 64) & 127) - 64);
    upper[i] = (v[i] - alternate(lower[i], lower[i] << 4)) >> 7;
  }
  const Digits first = narrowed(upper), second = narrowed(upper + 2);
  const Digits digits[3] = {even(first, second), odd(first, second),
                            even(narrowed(lower), narrowed(lower + 2))};
  memcpy(out, digits, sizeof digits);
}

// Half of a register for each of two rows.
INLINE I32 load_codes_of(const uint8_t *one, const uint8_t *other) {
  const __m256i first = _mm256_castsi128_si256(load<__m128i>(one));
  return (I32)_mm256_inserti128_si256(first, load<__m128i>(other), 1);
}

// CHAINS: sums that are added to in turn, where adding takes as long as multiplying.
#if defined(__AVXVNNI__)
constexpr int CHAINS = 2;
INLINE void add_product(I32 &sum, I32 codes, I32 numbers) {
  sum = (I32)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)numbers);
}
#else
constexpr int CHAINS = 1;
INLINE void add_product(I32 &sum, I32 codes, I32 numbers) {
  sum += (I32)_mm256_madd_epi16((__m256i)codes, (__m256i)numbers);
  asm("" : "+x"(sum));  // now: GCC keeps products in memory, to add them up at the end
}
#endif

// Products with digits, bytes times bytes, added up for a group: those of upper digits, and those
// of shared ones. AVX2 has sums of 16 bits, which hold two products of bytes with shared digits, or
// sixteen of codes with upper ones.
#if defined(__AVXVNNI__)
INLINE void add_upper(I32 &sum, I32 codes, I32 digits) {
  sum = (I32)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)digits);
}
INLINE void add_shared(I32 &sum, I32 bytes, I32 digits) { add_upper(sum, bytes, digits); }
INLINE I32 combined(I32 upper, I32 shared) { return (upper << 7) + shared; }
#else
INLINE void add_upper(I32 &sum, I32 codes, I32 digits) {
  const __m256i products = _mm256_maddubs_epi16((__m256i)codes, (__m256i)digits);
  sum = (I32)_mm256_add_epi16((__m256i)sum, products);
  asm("" : "+x"(sum));
}
INLINE void add_shared(I32 &sum, I32 bytes, I32 digits) {
  const __m256i products = _mm256_maddubs_epi16((__m256i)bytes, (__m256i)digits);
  add_product(sum, (I32)products, (I32)_mm256_set1_epi16(1));
}
INLINE I32 combined(I32 upper, I32 shared) {
  add_product(shared, upper, (I32)_mm256_set1_epi16(128));
  return shared;
}
#endif

// Calls body(u) for all units of a group. UNITS: their number, 0 if that is not known beforehand.
template <int UNITS, class Body>
INLINE void for_units(int64_t units, const Body &body) {
  if constexpr (UNITS) {
#pragma GCC unroll 8
    for (int64_t u = 0; u < UNITS; u++) body(u);
  } else {
    for (int64_t u = 0; u < units; u++) body(u);
  }
}

// The sums of q * v over the units of a group, of two rows, with M vectors.
template <class P, int M, int UNITS>
INLINE void sums_of_pair(const uint8_t *row, const uint8_t *other, int64_t units,
                         const char *const *numbers, I32 *sums) {
  I32 all[M][CHAINS] = {};
  for_units<UNITS>(units, [&](int64_t u) __attribute__((always_inline)) {
    const I32 q = load_codes_of(row + u * P::BYTES, other + u * P::BYTES);
#pragma GCC unroll 4
    for (int part = 0; part < P::PARTS; part++) {
      const I32 codes = P::widened(q, part);
#pragma GCC unroll 4
      for (int i = 0; i < M; i++) {
        auto from = reinterpret_cast<const int8_t *>(numbers[i] + (u * P::PARTS + part) * 16);
        add_product(all[i][part % CHAINS], codes, load_digits(from));
      }
    }
  });
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    sums[i] = CHAINS == 1 ? all[i][0] : all[i][0] + all[i][CHAINS - 1];
}

// Likewise with one vector's digits.
INLINE I32 digit_sums_of_pair(const uint8_t *row, const uint8_t *other, int64_t units,
                              const char *numbers) {
  auto digits = reinterpret_cast<const int8_t *>(numbers);
  I32 upper = {}, shared = {};
#pragma GCC unroll 4
  for (int64_t u = 0; u < units; u++, digits += 64) {
    const I32 q = load_codes_of(row + u * 16, other + u * 16);
    add_upper(upper, low_codes(q), load_digits(digits));
    add_upper(upper, high_codes(q), load_digits(digits + 16));
    add_shared(shared, q, load_digits(digits + 32));
  }
  return combined(upper, shared);
}

// Rows of an expert, `stride` bytes apart. count: how many of LANES there are. ahead: bytes from a
// row to one to prefetch, or 0.
struct PackedRows {
  const uint8_t *data;
  int64_t stride, first, ahead;
  int count;
};

// M vectors times LANES rows. GROUP: columns of a group, 0 if that is not known beforehand.
template <class P, int M, int GROUP>
static __attribute__((noinline)) void word_tile(const toast::Product &p,
                                                const toast::ExpertBatch &batch,
                                                const uint32_t *outputs, const PackedRows &rows) {
  constexpr int HALF = LANES / 2;
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout<true>::of(m);
  const int64_t group = GROUP ? GROUP : m.group_size, units = group / P::CODES;
  const int64_t stride = rows.stride;
  const char *vectors[M], *numbers[M];
  int64_t places[LANES];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    numbers[i] = vectors[i] =
        p.prepared + (p.vector ? p.vector[outputs[i]] : outputs[i]) * p.prepared_stride;
#pragma GCC unroll 8
  for (int j = 0; j < LANES; j++)  // missing rows repeat the last
    places[j] = batch.expert * m.rows + rows.first + (j < rows.count ? j : rows.count - 1);
  F32 results[M] = {};
  const uint8_t *at = rows.data;
  TilePrefetch ahead = {at + rows.ahead, stride};
  for (int64_t g = 0; g < layout.groups; g += LANES) {
    F32 scales[LANES], biases[LANES];
    if (rows.ahead) prefetch_scales(m, m.scales, places, layout.groups, g);
    if (rows.ahead && !P::E2M1) prefetch_scales(m, m.biases, places, layout.groups, g);
    both_by_group<P::E2M1>(m, places, layout.groups, g, scales, biases);
    const int64_t end = std::min<int64_t>(layout.groups, g + LANES);
    for (int64_t n = g; n < end; n++) {
      // Below with each pair of rows, where that is a constant number of bytes.
      if (rows.ahead && !GROUP) ahead.fetch(LANES * units * P::BYTES);
      I32 sums[M][HALF];
#pragma GCC unroll 4
      for (int j = 0; j < HALF; j++) {
        const uint8_t *row = at + j * stride, *other = row + HALF * stride;
        if (rows.ahead && GROUP) ahead.fetch(2 * units * P::BYTES);
        if constexpr (std::is_same_v<P, PackedPairs>) {
          sums[0][j] = digit_sums_of_pair(row, other, units, numbers[0]);
        } else {
          I32 both[M];
          sums_of_pair<P, M, GROUP / P::CODES>(row, other, units, numbers, both);
#pragma GCC unroll 4
          for (int i = 0; i < M; i++) sums[i][j] = both[i];
        }
      }
      at += units * P::BYTES;
#pragma GCC unroll 4
      for (int i = 0; i < M; i++) {
        numbers[i] += group * 2;
        auto steps = reinterpret_cast<const float *>(vectors[i] + layout.steps);
        auto totals = reinterpret_cast<const float *>(vectors[i] + layout.sums);
        const F32 sum = __builtin_convertvector(sums_of_rows(sums[i]), F32);
        results[i] = multiply_add(sum, scales[n - g] * steps[n], results[i]);
        results[i] = multiply_add(biases[n - g], splat(totals[n]), results[i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    put_some(p.out_type, p.out, outputs[i] * m.rows + rows.first, results[i], rows.count);
}

template <class P, int M>
INLINE void multiply_tile(const toast::Product &p, const toast::ExpertBatch &batch,
                          const uint32_t *outputs, const PackedRows &rows) {
  const int64_t group = p.matrix->group_size;
  if constexpr (M <= 2 && P::BYTES == UNIT) {  // 4 and 8 bits, a tenth faster so
    if (group == 32) return word_tile<P, M, 32>(p, batch, outputs, rows);
    if (group == 64) return word_tile<P, M, 64>(p, batch, outputs, rows);
  }
  word_tile<P, M, 0>(p, batch, outputs, rows);
}

// A batch of FEW_WORDS vectors at most times rows [first, end) of an expert. False if out of
// memory.
template <class P>
static bool multiply_few(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                         int64_t end) {
  const toast_matrix &m = *p.matrix;
  const int64_t stride = row_bytes(m);
  uint32_t outputs[FEW_WORDS];
  for (int i = 0; i < FEW_WORDS; i++)  // three and the last once more take less than two and one
    outputs[i] = batch.outputs[std::min<int64_t>(i, batch.size - 1)];
  for (int64_t n = first; n < end; n += LANES) {
    const int64_t row = batch.expert * m.rows + n;
    PackedRows rows = {row_at(m, row), stride, n, LANES * stride, 0};
    rows.count = int(std::min<int64_t>(end - n, LANES));
    // Units of the last rows may reach past their end; and missing rows are not there.
    if (rows.count < LANES || row + LANES >= m.experts * m.rows) {
      const int64_t bytes = LANES * stride + UNIT;
      auto copy = static_cast<uint8_t *>(toast::scratch(toast::BYTES, bytes));
      if (!copy) return false;
      memcpy(copy, rows.data, rows.count * stride);
      memset(copy + rows.count * stride, 0, bytes - rows.count * stride);
      rows.data = copy, rows.ahead = 0;
    }
    if (batch.size == 1 || std::is_same_v<P, PackedPairs>) {
      multiply_tile<P, 1>(p, batch, outputs, rows);
    } else if (batch.size == 2) {
      multiply_tile<P, 2>(p, batch, outputs, rows);
    } else {
      multiply_tile<P, 4>(p, batch, outputs, rows);
    }
  }
  return true;
}

}  // namespace

#include "word_panels.h"

namespace {

template <class P>
static bool multiply_words(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                           int64_t end) {
  if constexpr (std::is_same_v<P, PackedPairs>) {
    for (int64_t i = 0; i < batch.size; i++) {  // one, or the same several times
      const toast::ExpertBatch one = {batch.expert, 1, batch.outputs + i, batch.next_row};
      if (!multiply_few<P>(p, one, first, end)) return false;
    }
    return true;
  }
  return batch.size <= FEW_WORDS ? multiply_few<P>(p, batch, first, end)
                                 : multiply_many<P>(p, batch, first, end);
}

// Numbers of a group, as they meet codes.
template <bool NIBBLES>
INLINE void store_block(Numbers numbers, const I32 *v, char *out) {
  if (NIBBLES && numbers.in_digits) return store_digits(v, out);
  constexpr int PARTS = NIBBLES ? 4 : 2;
  __m128i words[PARTS];
  for (int i = 0; i < PARTS; i++) words[i] = as_words(v[i]);
  if constexpr (NIBBLES) Packing<4>::reorder(words);
  memcpy(out, words, sizeof words);
}

static bool multiply_codes(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  if (p.matrix->type == TOAST_E8M0) return multiply_words<PackedE2M1>(p, batch, first, end);
  switch (p.matrix->bits) {
    case 2: return multiply_words<Packing<2>>(p, batch, first, end);
    case 3: return multiply_words<Packing<3>>(p, batch, first, end);
    case 4:
      if (is_stored_in_digits(p)) return multiply_words<PackedPairs>(p, batch, first, end);
      return multiply_words<Packing<4>>(p, batch, first, end);
    case 5: return multiply_words<Packing<5>>(p, batch, first, end);
    case 6: return multiply_words<Packing<6>>(p, batch, first, end);
    default: return multiply_words<Packing<8>>(p, batch, first, end);
  }
}

}  // namespace
