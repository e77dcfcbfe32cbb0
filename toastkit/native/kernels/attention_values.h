// Softmax weights times int8 values, on int8 dot products: see attention_digits.h.
#pragma once

#include "attention_bytes.h"
#include "attention_words.h"

namespace {

#if defined(__AVX512VNNI__)
// quantise_weights for LANES rows from r on, (keys, lanes): to words of four keys, (SPAN_WORDS,
// lanes).
static void quantise_weights_of_lanes(const Int8Workspace &to, int64_t r, float *weights,
                                      int64_t lanes, int64_t keys) {
  const F32 inverse_step =
      scale_lanes(weights, to.scales, lanes, keys, MAX_WEIGHT, to.weight_steps + r);
  for (int64_t j = 0; j < keys; j += 4) {
    I32 words[2] = {};
    for (int i = 0; i < 4 && j + i < keys; i++) {
      const F32 weight = load<F32>(weights + (j + i) * lanes);
      const I32 v = round_to_int(inverse_step > 0 ? weight * inverse_step : F32{});
      words[0] |= v >> 8 << 8 * i, words[1] |= (v & 255) << 8 * i;
    }
    for (int part = 0; part < 2; part++) store(to.weights[part] + j / 4 * lanes + r, words[part]);
  }
}

// Adds weights * values to `all`, for M rows and one half of each 16 elements (interleave_values):
// int32 registers (M, two digits, two). values: at their first element; left: elements in the row
// from there on. row_words, key_words: weight words from row to row, and from four keys to the
// next.
template <int M, bool HIGH, bool FETCHES, Source SOURCE>
static void weigh_int8(const int32_t *upper, const int32_t *lower, int64_t row_words,
                       int64_t key_words, const char *values, int64_t stride, int64_t left,
                       int64_t keys, uint8_t *cached, int32_t *all, PacedPrefetch *prefetch) {
  PacedPrefetch paced = *prefetch;
  I32 sums[M][2][2];
#pragma GCC unroll 32
  for (int i = 0; i < 4 * M; i++) sums[i / 4][i / 2 % 2][i % 2] = load<I32>(all + i * LANES);
  const __mmask64 some = byte_mask(left);
  const int32_t *weights[2] = {upper, lower};
  int64_t at[4] = {0, stride, 2 * stride, 3 * stride};
  for (int64_t j = 0; j < keys; j += 4, values += 4 * stride, cached += 2 * REGISTER) {
    I32 fours[2];
    if (SOURCE == REUSE) {
      fours[0] = load<I32>(cached), fours[1] = load<I32>(cached + REGISTER);
    } else {
      if (keys - j < 4)  // repeat the last, with weights of 0
        for (int64_t i = keys - j; i < 4; i++) at[i] = (keys - j - 1) * stride;
      interleave_values<HIGH>(values, at, some, fours);
      if (SOURCE == LOAD_AND_KEEP) store(cached, fours[0]), store(cached + REGISTER, fours[1]);
    }
    if (FETCHES) paced.fetch();
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const I32 weight = splat_word(weights[part] + m * row_words);
        sums[m][part][0] = dpbusd(sums[m][part][0], weight, fours[0]);
        sums[m][part][1] = dpbusd(sums[m][part][1], weight, fours[1]);
      }
    weights[0] += key_words, weights[1] += key_words;
  }
  *prefetch = paced;
#pragma GCC unroll 32
  for (int i = 0; i < 4 * M; i++) store(all + i * LANES, sums[i / 4][i / 2 % 2][i % 2]);
}

// Weighted values of a span, for all heads of a tile; sets `out`. weights: as in weigh_values. FEW
// queries are memory-bound: the next span's keys are prefetched meanwhile.
template <bool FEW>
static void weigh_values_int8(const toast::Attention &a, const toast::Tile &tile,
                              int64_t begin, int64_t keys, float *weights, int64_t lanes,
                              int64_t head_weights, const Int8Workspace &digits, float *out) {
  const toast_rows &values = a.call->values;
  const int64_t size = a.call->value_size, stride = values.strides[2], rows = tile.rows;
  const int64_t row_words = FEW ? SPAN_WORDS : 1, key_words = FEW ? 1 : lanes;
  const int64_t halves = 2 * padded_row(size) / REGISTER;
  const int64_t block = rows <= TILE_M ? BLOCK_VALUES : toast::SPAN;
  int64_t passes = 0;
  by_row_tiles(rows, [&]<int M>(int64_t) { passes += halves; });
  PacedPrefetch prefetch = prefetch_next_keys(a, tile, begin + keys,
                                              tile.heads * passes * ((keys + 3) / 4));
  for (int64_t h = 0; h < tile.heads; h++) {
    const char *from = row_of(values, tile.batch, tile.head + h, begin);
    load_scales(from, stride, size, keys, digits.scales);
    for (int64_t r = 0; !FEW && r < rows; r += LANES)
      quantise_weights_of_lanes(digits, r, weights + r, lanes, keys);
    for (int64_t r = 0; FEW && r < rows; r++)
      digits.weight_steps[r] =
          quantise_weights(weights + r * SCORES_STRIDE, digits.scales, keys,
                           reinterpret_cast<uint8_t *>(digits.weights[0] + r * SPAN_WORDS),
                           reinterpret_cast<uint8_t *>(digits.weights[1] + r * SPAN_WORDS), [] {});
    memset(digits.weighted, 0, halves * rows * 4 * REGISTER);
    for (int64_t j = 0; j < keys; j += block) {
      const int64_t some = keys - j < block ? keys - j : block;
      auto weigh_half = [&]<bool HIGH>(int64_t half) {
        const int64_t d = half / 2 * REGISTER;
        by_row_tiles(rows, [&]<int M>(int64_t r) {
          const bool again = r > 0, last = r + M == rows;
          auto weigh = again  ? weigh_int8<M, HIGH, FEW, REUSE>
                       : last ? weigh_int8<M, HIGH, FEW, LOAD>
                              : weigh_int8<M, HIGH, FEW, LOAD_AND_KEEP>;
          const int64_t first = r * row_words + j / 4 * key_words;
          weigh(digits.weights[0] + first, digits.weights[1] + first, row_words, key_words,
                from + j * stride + d, stride, size - d, some, digits.values,
                digits.weighted + (half * rows + r) * 4 * LANES, &prefetch);
        });
      };
      for (int64_t half = 0; half < halves; half += 2)
        weigh_half.template operator()<false>(half), weigh_half.template operator()<true>(half + 1);
    }
    for (int64_t i = 0; i < halves / 2 * rows; i++) {
      const int64_t r = i % rows, d = i / rows * REGISTER;
      store_values(digits.weighted + (i / rows * 2 * rows + r) * 4 * LANES, rows * 4 * LANES,
                   2 * LANES, digits.weight_steps[r], size - d, out + r * a.row_floats + d);
    }
    weights += head_weights, out += rows * a.row_floats;
  }
}
#elif !defined(__AVX2__)
template <bool FEW, class... Rest>
INLINE void weigh_values_int8(const Rest &...) {}
#endif

}  // namespace
