// Attention over keys and values in 8 bits, for processors that multiply bytes. What these meet has
// 16: whole numbers with a step a row, which are two digits in base 256. Digits and bytes add up to
// whole numbers, the same in any order, for few queries and for many.
//
//   score = (256 * sum of upper * key + sum of lower * key) * (query's step * key's scale)
//
// A weight is multiplied by the scale of its value before it becomes digits. Half a step is 2^-16
// of a query's largest number, and 2^-17 of the largest of those weights in a span.
#pragma once

#include <float.h>
#include <math.h>

#include <type_traits>

#include "attention_room.h"

namespace {

#if defined(__AVX512VNNI__)
INLINE bool in_bytes(const toast_rows &rows) { return rows.type == TOAST_I8; }

constexpr float MOST_QUERY = 127 * 256 + 127;      // digits from -127 to 127 and from -128 to 127
constexpr float MOST_WEIGHT = 255 * 256 + 255;     // both from 0 to 255
constexpr float LEAST_NUMBER = 0x1p-100f;          // a row without anything larger is zeros

// Adds up products of unsigned bytes and signed ones, four at a time.
INLINE I32 plus_fours(I32 sum, I32 bytes, I32 signed_bytes) {
  return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)signed_bytes);
}

INLINE I32 word(const void *p) { return load<int32_t>(p) - I32{}; }  // the same in all lanes

INLINE I32 plus_128(I32 signed_bytes) { return signed_bytes ^ int32_t(0x80808080); }

INLINE I32 whole(F32 v) { return (I32)_mm512_cvtps_epi32((__m512)v); }

INLINE F32 of_digits(I32 upper, I32 lower) {
  return multiply_add(__builtin_convertvector(upper, F32), all(256),
                      __builtin_convertvector(lower, F32));
}

// Bytes that are a row's, of those in a register.
INLINE __mmask64 some_bytes(int64_t left) {
  return left < REGISTER ? (uint64_t(1) << left) - 1 : ~uint64_t(0);
}

// Numbers whose largest is `most`: how far apart whole ones are, and one over that, or 0 where all
// become zeros. nothing: 0, or NaN where one is NaN or infinite.
struct Step {
  float step, per_step;
  INLINE Step of(float most, float nothing, float largest) {
    const bool some = most > LEAST_NUMBER && most <= FLT_MAX;
    return {(some ? most / largest : 0) + nothing, some ? largest / most : 0};
  }
};

// Query r, as a row of floats with zeros behind it, to its digits.
static void put_query(const Digits &to, int64_t r, const float *x, int64_t size) {
  F32 most = {}, nothing = {};
  for (int64_t d = 0; d < size; d += LANES) {
    const F32 v = load<F32>(x + d), magnitude = (F32)((U32)v & 0x7fffffff);
    most = magnitude > most ? magnitude : most;
    nothing += v - v;
  }
  const Step step = Step::of(_mm512_reduce_max_ps((__m512)most), sum(nothing), MOST_QUERY);
  I32 uppers = {}, lowers = {};
  for (int64_t d = 0; d < to.stride; d += LANES) {
    const I32 v = d < size && step.per_step ? whole(load<F32>(x + d) * step.per_step) : I32{};
    const I32 upper = (v + 128) >> 8, lower = v - (upper << 8);
    store(to.queries[0] + r * to.stride + d, __builtin_convertvector(upper, I8));
    store(to.queries[1] + r * to.stride + d, __builtin_convertvector(lower, I8));
    uppers += upper, lowers += lower;
  }
  to.query_steps[r] = step.step;
  to.offsets[0][r] = 128 * _mm512_reduce_add_epi32((__m512i)uppers);
  to.offsets[1][r] = 128 * _mm512_reduce_add_epi32((__m512i)lowers);
}

// KEYS_TURNED keys, the last one of `left` again after it, to columns of four bytes plus 128,
// (stride / 4, KEYS_TURNED) words; and their scales.
static void turn_keys(const char *keys, int64_t stride, int64_t left, int64_t size,
                      const Digits &to) {
  for (int first = 0; first < KEYS_TURNED; first += LANES) {
    const char *row[LANES];
    float *scales = to.scales + first;
    for (int i = 0; i < LANES; i++) {
      row[i] = keys, scales[i] = scale_of(keys, size);
      keys += first + i + 1 < left ? stride : 0;
    }
    uint8_t *columns = to.keys + 4 * first;
    for (int64_t d = 0; d < size; d += REGISTER, columns += REGISTER * KEYS_TURNED) {
      const __mmask64 some = some_bytes(size - d);
      F32 r[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) r[i] = (F32)_mm512_maskz_loadu_epi8(some, row[i] + d);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(columns + 4 * i * KEYS_TURNED, plus_128((I32)r[i]));
    }
  }
}

// out[n][key] = the score of query first + n with a key that is turned, of so many words.
template <int N>
static void cross_key_bytes(const Digits &digits, int64_t first, int64_t words, Later *later,
                            float *out) {
  constexpr int V = KEYS_TURNED / LANES;
  Later fetched = *later;
  I32 sums[N][2][V];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++)
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[n][part][v] = I32{} - digits.offsets[part][first + n];
  const int32_t *queries = digits.columns[0] + first * digits.stride / 2;
  const uint8_t *columns = digits.keys;
  for (int64_t k = 0; k < words; k++, queries += 2 * N, columns += 4 * KEYS_TURNED) {
    I32 keys[V];
    fetched.fetch();
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) keys[v] = load<I32>(columns + 4 * v * LANES);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const I32 query = word(queries + 2 * n + part);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++)
          sums[n][part][v] = plus_fours(sums[n][part][v], keys[v], query);
      }
  }
  *later = fetched;
#pragma GCC unroll 2
  for (int v = 0; v < V; v++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const F32 steps = all(digits.query_steps[first + n]) *
                        load<F32>(digits.scales + v * LANES);
      store(out + n * SCORES_STRIDE + v * LANES,
            of_digits(sums[n][0][v], sums[n][1][v]) * steps);
    }
}

// N: queries of a head, of which those after the tile's are zeros. The values of the span are
// fetched meanwhile.
template <int N>
static void scores_of_few_bytes(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                                int64_t end, const Room &room, const Digits &digits) {
  constexpr int M = N < 4 ? N : 4;  // that meet turned keys at a time
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, stride = call.keys.strides[2], words = (size + 3) / 4;
  for (int64_t r = 0; r < tile.heads * N; r++) {
    widen_query(a, tile.of_head(r / N), r % N, room.queries);
    put_query(digits, r, room.queries, size);
    // Word by word of M queries, upper and lower digits of each in turn.
    int32_t *to = digits.columns[0] + r / M * M * digits.stride / 2 + r % M * 2;
    for (int64_t k = 0; k < words; k++)
      for (int part = 0; part < 2; part++)
        to[k * 2 * M + part] = load<int32_t>(digits.queries[part] + r * digits.stride + 4 * k);
  }
  const char *keys = row_of(call.keys, tile.batch, tile.head, begin);
  const int64_t row = row_bytes<TOAST_I8>(size), count = end - begin;
  const int64_t blocks = (count + KEYS_TURNED - 1) / KEYS_TURNED;
  Later later = later_of(a, call.values, tile, begin, end, blocks * tile.heads * (N / M) * words);
  for (int64_t j = 0; j < count; j += KEYS_TURNED)
    for (int64_t h = 0; h < tile.heads; h++) {
      turn_keys(keys + j * stride + h * row, stride, count - j, size, digits);
      for (int64_t n = h * N; n < (h + 1) * N; n += M)
        cross_key_bytes<M>(digits, n, words, &later, room.scores + n * SCORES_STRIDE + j);
    }
}

// sums[n][lane] = columns[:, lane] . rows[n], of V * LANES lanes. columns: (count, V * LANES) words
// of digits. rows: bytes plus 128, a stride apart.
template <int V, int N>
static void cross_bytes(const int32_t *columns, const uint8_t *rows, int64_t stride, int64_t count,
                        int32_t *out) {
  I32 sums[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[n][v] = I32{};
  for (int64_t k = 0; k < count; k++) {
    I32 column[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) column[v] = load<I32>(columns + (k * V + v) * LANES);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const I32 bytes = word(rows + n * stride + 4 * k);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[n][v] = plus_fours(sums[n][v], bytes, column[v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + (n * V + v) * LANES, sums[n][v]);
}

static void scores_of_many_bytes(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                                 int64_t end, int vectors, const Room &room,
                                 const Digits &digits) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, lanes = vectors * LANES, stride = digits.stride;
  for (int64_t r = 0; r < lanes; r++) {
    widen_query(a, tile, r, room.queries);
    put_query(digits, r, room.queries, size);
  }
  for (int part = 0; part < 2; part++)
    for (int v = 0; v < vectors; v++)
      for (int64_t d = 0; d < stride; d += REGISTER) {
        F32 r[LANES];
        for (int i = 0; i < LANES; i++)
          r[i] = load<F32>(digits.queries[part] + (v * LANES + i) * stride + d);
        transpose(r);
        for (int i = 0; i < LANES; i++)
          store(digits.columns[part] + (d / 4 + i) * lanes + v * LANES, r[i]);
      }
  for (int64_t j = begin; j < end; j += TILE_M) {
    const int64_t count = end - j < TILE_M ? end - j : TILE_M;
    const char *keys[TILE_M];
    for (int64_t n = 0; n < count; n++) {
      keys[n] = row_of(call.keys, tile.batch, tile.head, j + n);
      for (int64_t d = 0; d < stride; d += REGISTER)
        store(digits.keys + n * stride + d,
              plus_128((I32)_mm512_maskz_loadu_epi8(some_bytes(size - d), keys[n] + d)));
    }
    for (int part = 0; part < 2; part++)
      in_tiles(count, [&]<int N>(int64_t n) {
        const int32_t *columns = digits.columns[part];
        const uint8_t *from = digits.keys + n * stride;
        int32_t *to = digits.sums[part] + n * lanes;
        const int64_t words = (size + 3) / 4;
        if (vectors == 1) return cross_bytes<1, N>(columns, from, stride, words, to);
        if (vectors == 2) return cross_bytes<2, N>(columns, from, stride, words, to);
        cross_bytes<4, N>(columns, from, stride, words, to);
      });
    for (int64_t n = 0; n < count; n++)
      for (int64_t r = 0; r < lanes; r += LANES) {
        I32 sums[2];
        for (int part = 0; part < 2; part++)
          sums[part] = load<I32>(digits.sums[part] + n * lanes + r) -
                       load<I32>(digits.offsets[part] + r);
        const F32 steps = load<F32>(digits.query_steps + r) * all(scale_of(keys[n], size));
        store(room.scores + (j - begin + n) * lanes + r, of_digits(sums[0], sums[1]) * steps);
      }
  }
}

// vectors: 0 where queries are few.
static void scores_in_bytes(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                            int64_t end, int vectors, const Room &room, const Digits &digits) {
  if (vectors) return scores_of_many_bytes(a, tile, begin, end, vectors, room, digits);
  with_rows(tile.rows,
            [&]<int N>() { scores_of_few_bytes<N>(a, tile, begin, end, room, digits); });
}
#else
// What other processors multiply is floats.
struct Digits {};
INLINE bool in_bytes(const toast_rows &) { return false; }
INLINE bool make_digits(const toast::Attention &, Digits *) { return false; }
template <class... Rest>
INLINE void scores_in_bytes(const Rest &...) {}
#endif

}  // namespace
