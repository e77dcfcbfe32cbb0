// int8 keys and values on AVX2, which multiplies words (16 bits) and adds neighbours. Queries and
// softmax weights become words with a scale per row: see attention_digits.h. A sum fits into 32
// bits, so it is exact in any order.
//
//   score = sum of query * key * (query scale * key scale)
#pragma once

#include "attention_digits.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr float MAX_WEIGHT = 32767;  // times 128 and SPAN: below 2^31
static_assert(MAX_WEIGHT * 128 * toast::SPAN < 0x1p31f);

typedef int16_t I16 __attribute__((vector_size(2 * WORDS)));

// Per lane, the sum of two products.
INLINE I32 multiply_pairs(I16 a, I16 b) {
  return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

INLINE I16 splat_pair(const int16_t *p) { return (I16)(load<int32_t>(p) - I32{}); }

static int64_t prepared_bytes(const toast::Attention &, int64_t, int64_t) { return 0; }
static void prepare(const toast::Attention &, const toast::Tile &, char *) {}

// Where WORDS elements of a row begin, of which the first is d: the last ones end with the row,
// where queries have zeros for those that were met before. So nothing is read beyond a row.
INLINE int64_t block_of(int64_t d, int64_t size) {
  return d + WORDS <= size || size < WORDS ? d : size - WORDS;
}

INLINE __m128i bytes_at(const char *row, int64_t d, int64_t size) {
  if (size >= WORDS) return load<__m128i>(row + block_of(d, size));
  __m128i bytes = {};
  memcpy(&bytes, row, size);
  return bytes;
}

INLINE I16 words_at(const char *row, int64_t d, int64_t size) {
  return (I16)_mm256_cvtepi8_epi16(bytes_at(row, d, size));
}

// Words of query r of a tile, and its step. Those of a key of 516 numbers and more are smaller.
static void quantise_query(const toast::Attention &a, const toast::Tile &tile, int64_t r,
                           int16_t *to, float *to_step) {
  const int64_t size = a.call->key_size, whole = padded_words(size), rest = size % WORDS;
  const float fits = float((int64_t(1) << 31) / 128 / size - 1);
  auto floats = [&](int64_t d) __attribute__((always_inline)) {
    return query_floats(a, tile, r, d);
  };
  const Step step = step_of_floats(size, fits < 32767 ? fits : 32767, floats);
  for (int64_t d = 0; d < whole; d += LANES) {
    const I32 v = step.inverse_step ? round_to_int(floats(d) * step.inverse_step) : I32{};
    store(to + d, as_words(v));
  }
  if (size > WORDS && rest) {  // see block_of
    int16_t *const last = to + whole - WORDS;
    memmove(last + WORDS - rest, last, rest * sizeof *to);
    memset(last, 0, (WORDS - rest) * sizeof *to);
  }
  *to_step = step.step;
}

// Adds up the lanes of eight registers: lane i of the result is the sum of r[i].
INLINE I32 sums_of_lanes(const I32 *r) {
  auto add = [](I32 a, I32 b) { return (I32)_mm256_hadd_epi32((__m256i)a, (__m256i)b); };
  const __m256i low = (__m256i)add(add(r[0], r[1]), add(r[2], r[3]));
  const __m256i high = (__m256i)add(add(r[4], r[5]), add(r[6], r[7]));
  return (I32)_mm256_permute2x128_si256(low, high, 0x20) +
         (I32)_mm256_permute2x128_si256(low, high, 0x31);
}

// out[n][key] = N queries times LANES / N keys, as int32. queries: N words of each block in turn.
template <int N>
INLINE void dot_keys_int8(const int16_t *queries, const char *const *rows, int64_t size,
                          PacedPrefetch *prefetch, float *out) {
  constexpr int KEYS = LANES / N;
  PacedPrefetch paced = *prefetch;
  I32 sums[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i++) sums[i] = I32{};
  auto meet = [&](int64_t d) __attribute__((always_inline)) {
    I16 keys[KEYS];
#pragma GCC unroll 8
    for (int k = 0; k < KEYS; k++)
      keys[k] = (I16)_mm256_cvtepi8_epi16(load<__m128i>(rows[k] + d));
    if (KEYS > 2) paced.fetch();
#pragma GCC unroll 4
    for (int n = 0; n < N; n++, queries += WORDS) {
      const I16 query = load<I16>(queries);
#pragma GCC unroll 8
      for (int k = 0; k < KEYS; k++) sums[n * KEYS + k] += multiply_pairs(query, keys[k]);
    }
  };
  int64_t d = 0;
  for (; d + WORDS <= size; d += WORDS) meet(d);
  if (d < size) meet(block_of(d, size));
  if (KEYS <= 2) paced.fetch(padded_words(size) / WORDS);
  *prefetch = paced;
  int32_t all[LANES];
  store(all, sums_of_lanes(sums));
#pragma GCC unroll 4
  for (int n = 0; n < N; n++)
    memcpy(out + n * SCORES_STRIDE, all + n * KEYS, KEYS * sizeof *out);
}

// Few queries; N: padded_rows of a head. The span's values are prefetched meanwhile.
template <int N>
static void scores_of_few_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                               int64_t end, const Workspace &space, const Int8Workspace &to) {
  constexpr int M = N < 4 ? N : 4, KEYS = LANES / M;
  const int64_t size = a.call->key_size, stride = a.call->keys.strides[2];
  for (int64_t r = 0; r < tile.heads * N; r++) {
    quantise_query(a, tile.of_head(r / N), r % N, to.columns, to.query_steps + r);
    int16_t *block = to.queries + r / M * M * to.stride + r % M * WORDS;
    for (int64_t d = 0; d < to.stride; d += WORDS, block += M * WORDS)
      store(block, load<I16>(to.columns + d));
  }
  const char *keys = row_of(a.call->keys, tile.batch, tile.head, begin);
  const int64_t row = row_bytes<TOAST_I8>(size), count = end - begin;
  const int64_t groups = (count + KEYS - 1) / KEYS * tile.heads * (N / M);
  PacedPrefetch prefetch =
      prefetch_of(a, a.call->values, tile, begin, end, groups * to.stride / WORDS);
  for (int64_t j = 0; j < count; j += KEYS)
    for (int64_t h = 0; h < tile.heads; h++) {
      const char *rows[KEYS];  // missing ones repeat the last
      char copies[KEYS][WORDS];
      for (int i = 0; i < KEYS; i++) {
        rows[i] = keys + (j + i < count ? j + i : count - 1) * stride + h * row;
        if (size < WORDS) store(copies[i], bytes_at(rows[i], 0, size)), rows[i] = copies[i];
      }
      for (int64_t n = h * N; n < h * N + N; n += M)
        dot_keys_int8<M>(to.queries + n * to.stride, rows, size, &prefetch,
                         space.scores + n * SCORES_STRIDE + j);
    }
  for (int64_t r = 0; r < tile.heads * N; r++) {
    if (r % N == 0) load_scales(keys + r / N * row, stride, size, count, to.scales);
    float *scores = space.scores + r * SCORES_STRIDE;
    for (int64_t j = 0; j < count; j += LANES)
      store(scores + j, __builtin_convertvector(load<I32>(scores + j), F32) *
                            (splat(to.query_steps[r]) * load<F32>(to.scales + j)));
  }
}

// Scores of N keys, (N, V * LANES). columns: (pairs, V * LANES). keys: words, `stride` apart.
template <int V, int N>
static void dot_columns_int8(const int16_t *columns, const int16_t *keys, int64_t stride,
                             const float *steps, const float *scales, float *out) {
  I32 sums[N][V];
#pragma GCC unroll 8
  for (int i = 0; i < N * V; i++) sums[i / V][i % V] = I32{};
  for (int64_t k = 0; k < stride; k += 2) {
    I16 pairs[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) pairs[n] = splat_pair(keys + n * stride + k);
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const I16 column = load<I16>(columns + (k / 2 * V + v) * WORDS);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[n][v] += multiply_pairs(pairs[n], column);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N * V; i++)
    store(out + i * LANES, __builtin_convertvector(sums[i / V][i % V], F32) *
                               (load<F32>(steps + i % V * LANES) * splat(scales[i / V])));
}

static void scores_of_many_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                                int64_t end, int vectors, const Workspace &space,
                                const Int8Workspace &to) {
  const int64_t size = a.call->key_size, lanes = vectors * LANES, stride = to.stride;
  for (int64_t r = 0; r < lanes; r++) {
    quantise_query(a, tile, r, to.queries + r * stride, to.query_steps + r);
    for (int64_t d = 0; d < stride; d += 2)
      memcpy(to.columns + d * lanes + 2 * r, to.queries + r * stride + d, 2 * sizeof(int16_t));
  }
  for (int64_t j = begin; j < end; j += KEY_ROWS) {
    const int64_t count = end - j < KEY_ROWS ? end - j : KEY_ROWS;
    float scales[KEY_ROWS];
    for (int64_t n = 0; n < count; n++) {
      const char *key = row_of(a.call->keys, tile.batch, tile.head, j + n);
      scales[n] = scale_of(key, size);
      for (int64_t d = 0; d < stride; d += WORDS)
        store(to.keys + n * stride + d, words_at(key, d, size));
    }
    by_row_tiles<KEY_ROWS>(count, [&]<int N>(int64_t n) {
      const int16_t *keys = to.keys + n * stride;
      float *out = space.scores + (j - begin + n) * lanes;
      auto dot = vectors == 1   ? dot_columns_int8<1, N>
                 : vectors == 2 ? dot_columns_int8<2, N>
                                : dot_columns_int8<4, N>;
      dot(to.columns, keys, stride, to.query_steps, scales + n, out);
    });
  }
}

// vectors: 0 if queries are few.
static void scores_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, int vectors, const Workspace &space,
                        const Int8Workspace &to) {
  if (vectors) return scores_of_many_int8(a, tile, begin, end, vectors, space, to);
  dispatch_rows(tile.rows,
                [&]<int N>() { scores_of_few_int8<N>(a, tile, begin, end, space, to); });
}

// Weights of a head as pairs of keys: see Int8Workspace.
template <bool FEW>
static void quantise_weights(const Int8Workspace &to, int64_t rows, float *weights, int64_t lanes,
                             int64_t keys) {
  for (int64_t r = 0; FEW && r < rows; r++) {
    float *row = weights + r * SCORES_STRIDE;
    const Step step = scale_weights(row, to.scales, keys, MAX_WEIGHT);
    to.weight_steps[r] = step.step;
    for (int64_t j = 0; j < keys; j += LANES)
      store(to.weights + r * toast::SPAN + j,
            as_words(round_to_int(load<F32>(row + j) * step.inverse_step)));
  }
  for (int64_t r = 0; !FEW && r < rows; r += LANES) {
    const F32 inverse_step =
        scale_lanes(weights + r, to.scales, lanes, keys, MAX_WEIGHT, to.weight_steps + r);
    auto word = [&](int64_t j) {
      const F32 weight = j < keys ? load<F32>(weights + j * lanes + r) : F32{};
      return round_to_int(inverse_step > 0 ? weight * inverse_step : F32{});
    };
    for (int64_t j = 0; j < keys; j += 2)
      store(to.weights + j * lanes + 2 * r, (word(j) & 0xffff) | word(j + 1) << 16);
  }
}

// Two keys' values, of WORDS elements, side by side.
INLINE void pair_values(__m128i one, __m128i other, I16 *pair) {
  pair[0] = (I16)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(one, other));
  pair[1] = (I16)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(one, other));
}

// Calls work.operator()<M>(first) over `rows` rows, 4 at a time, then 2, 1.
template <class Work>
INLINE void by_fours(int64_t rows, const Work &work) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) work.template operator()<4>(r);
  if (r + 2 <= rows) work.template operator()<2>(r), r += 2;
  if (r < rows) work.template operator()<1>(r);
}

// Adds weights * values to `all`, M rows of each of D blocks of WORDS, `apart`. pair(i, j, words):
// values of block i of keys j and j + 1. row, step: from one row's weights, and one pair's, to the
// next.
template <int M, int D, class Pair>
INLINE void weigh_pairs(const int16_t *weights, int64_t row, int64_t step, int64_t keys,
                        PacedPrefetch *prefetch, int32_t *all, int64_t apart, const Pair &pair) {
  PacedPrefetch paced = *prefetch;
  I32 sums[D][M][2];
#pragma GCC unroll 8
  for (int i = 0; i < 2 * D * M; i++)
    sums[i / 2 / M][i / 2 % M][i % 2] = load<I32>(all + i / 2 / M * apart + i % (2 * M) * LANES);
  for (int64_t j = 0; j < keys; j += 2, weights += step) {
    paced.fetch();
#pragma GCC unroll 4
    for (int i = 0; i < D; i++) {
      I16 values[2];
      pair(i, j, values);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const I16 weight = splat_pair(weights + m * row);
        sums[i][m][0] += multiply_pairs(weight, values[0]);
        sums[i][m][1] += multiply_pairs(weight, values[1]);
      }
    }
  }
  *prefetch = paced;
#pragma GCC unroll 8
  for (int i = 0; i < 2 * D * M; i++)
    store(all + i / 2 / M * apart + i % (2 * M) * LANES, sums[i / 2 / M][i / 2 % M][i % 2]);
}

// How the weights of a head meet blocks of its values, from key j of the span on; `some` keys.
struct ValueBlocks {
  const Int8Workspace &to;
  int64_t rows, size, row, step;  // row, step: as in weigh_pairs
  PacedPrefetch prefetch;

  // Few rows meet values as stored, others what has been paired once.
  bool are_paired() const { return rows > 4 || size < WORDS; }

  template <int M, int D, class Pair>
  void weigh(int64_t r, int64_t d, int64_t j, int64_t some, const Pair &pair) {
    weigh_pairs<M, D>(to.weights + r * row + j / 2 * step, row, step, some, &prefetch,
                      to.weighted + d * rows + r * WORDS, WORDS * rows, pair);
  }

  template <int M, int D>
  void weigh_stored(int64_t r, int64_t d, int64_t j, const char *values, int64_t stride,
                    int64_t some) {
    const char *at[D];
    for (int i = 0; i < D; i++) at[i] = values + block_of(d + i * WORDS, size);
    weigh<M, D>(r, d, j, some, [=](int i, int64_t k, I16 *pair) {
      const char *value = at[i] + k * stride;  // a weight of 0 meets a last key again
      const char *next = k + 1 < some ? value + stride : value;
      pair_values(load<__m128i>(value), load<__m128i>(next), pair);
    });
  }

  void weigh_all_stored(int64_t j, const char *values, int64_t stride, int64_t some) {
    by_fours(rows, [&]<int M>(int64_t r) {
      constexpr int D = 4 / M;
      int64_t d = 0;
      for (; d + D * WORDS <= padded_words(size); d += D * WORDS)
        weigh_stored<M, D>(r, d, j, values, stride, some);
      for (; d < size; d += WORDS) weigh_stored<M, 1>(r, d, j, values, stride, some);
    });
  }

  void weigh_all_paired(int64_t j, const char *values, int64_t stride, int64_t some) {
    for (int64_t d = 0; d < size; d += WORDS) {
      int16_t *const paired = to.values;
      for (int64_t k = 0; k < some; k += 2) {
        const char *value = values + k * stride, *next = k + 1 < some ? value + stride : value;
        I16 pair[2];
        pair_values(bytes_at(value, d, size), bytes_at(next, d, size), pair);
        store(paired + k * WORDS, pair[0]), store(paired + (k + 1) * WORDS, pair[1]);
      }
      by_fours(rows, [&]<int M>(int64_t r) {
        weigh<M, 1>(r, d, j, some, [=](int, int64_t k, I16 *pair) {
          pair[0] = load<I16>(paired + k * WORDS), pair[1] = load<I16>(paired + (k + 1) * WORDS);
        });
      });
    }
  }

  void finish(float *out, int64_t out_stride) const {
    for (int64_t d = 0; d < size; d += WORDS)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < WORDS && (size >= WORDS || i < size); i += LANES) {
          const I32 sums = load<I32>(to.weighted + d * rows + r * WORDS + i);
          store(out + r * out_stride + block_of(d, size) + i,
                __builtin_convertvector(sums, F32) * splat(to.weight_steps[r]));
        }
  }
};

// Weighted values of a span, for all heads of a tile; sets `out`. weights: as in weigh_values. FEW
// queries are memory-bound: the next span's keys are prefetched meanwhile.
template <bool FEW>
static void weigh_values_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                              int64_t keys, float *weights, int64_t lanes, int64_t head_weights,
                              const Int8Workspace &to, float *out) {
  const toast_rows &values = a.call->values;
  const int64_t size = a.call->value_size, stride = values.strides[2], rows = tile.rows;
  const int64_t padded = padded_words(size);
  ValueBlocks blocks = {to, rows, size, FEW ? toast::SPAN : 2, FEW ? 2 : 2 * lanes, {}};
  const int64_t at_once = blocks.are_paired() || rows > 2 ? 1 : 4 / rows;
  const int64_t passes = (padded / WORDS + at_once - 1) / at_once * ((rows + 3) / 4);
  if (FEW)
    blocks.prefetch = prefetch_next_keys(a, tile, begin + keys,
                                         tile.heads * passes * ((keys + 1) / 2));
  for (int64_t h = 0; h < tile.heads; h++, weights += head_weights, out += rows * a.row_floats) {
    const char *from = row_of(values, tile.batch, tile.head + h, begin);
    load_scales(from, stride, size, keys, to.scales);
    quantise_weights<FEW>(to, rows, weights, lanes, keys);
    memset(to.weighted, 0, rows * padded * sizeof *to.weighted);
    for (int64_t j = 0; j < keys; j += BLOCK_VALUES) {
      const int64_t some = keys - j < BLOCK_VALUES ? keys - j : BLOCK_VALUES;
      const char *block = from + j * stride;
      blocks.are_paired() ? blocks.weigh_all_paired(j, block, stride, some)
                          : blocks.weigh_all_stored(j, block, stride, some);
    }
    blocks.finish(out, a.row_floats);
  }
}
#endif

}  // namespace
