// Values in 8 bits, weighted, for processors that multiply bytes: see attention_bytes.h.
#pragma once

#include "attention_bytes.h"

namespace {

#if defined(__AVX512VNNI__)
// Weights of row r, (keys), to digits, bytes; which are zeros up to a multiple of LANES, as weights
// and scales are. A number that is none becomes 0.
static void put_weights_of_row(const Digits &to, int64_t r, float *weights, int64_t keys) {
  const float *scales = to.scales;
  F32 most = {}, nothing = {};
  for (int64_t j = 0; j < keys; j += LANES) {
    const F32 v = load<F32>(weights + j) * load<F32>(scales + j);
    store(weights + j, v);
    most = v > most ? v : most;
    nothing += v - v;
  }
  const Step step = Step::of(_mm512_reduce_max_ps((__m512)most), sum(nothing), MOST_WEIGHT);
  auto upper = reinterpret_cast<uint8_t *>(to.weights[0] + r * FOURS);
  auto lower = reinterpret_cast<uint8_t *>(to.weights[1] + r * FOURS);
  for (int64_t j = 0; j < keys; j += LANES) {
    const I32 v = whole(load<F32>(weights + j) * step.per_step);
    store(upper + j, __builtin_convertvector(v >> 8, U8));
    store(lower + j, __builtin_convertvector(v, U8));
  }
  to.weight_steps[r] = step.step;
}

// The same of LANES rows from r on, (keys, lanes), to words of four keys, (FOURS, lanes).
static void put_weights_of_lanes(const Digits &to, int64_t r, float *weights, int64_t lanes,
                                 int64_t keys) {
  F32 most = {}, nothing = {}, per_step;
  for (int64_t j = 0; j < keys; j++) {
    const F32 v = load<F32>(weights + j * lanes) * to.scales[j];
    store(weights + j * lanes, v);
    most = v > most ? v : most;
    nothing += v - v;
  }
  for (int i = 0; i < LANES; i++) {
    const Step step = Step::of(most[i], nothing[i], MOST_WEIGHT);
    to.weight_steps[r + i] = step.step, per_step[i] = step.per_step;
  }
  for (int64_t j = 0; j < keys; j += 4) {
    I32 words[2] = {};
    for (int i = 0; i < 4 && j + i < keys; i++) {
      const F32 weight = load<F32>(weights + (j + i) * lanes);
      const I32 v = whole(per_step > 0 ? weight * per_step : F32{});
      words[0] |= v >> 8 << 8 * i, words[1] |= (v & 255) << 8 * i;
    }
    for (int part = 0; part < 2; part++) store(to.weights[part] + j / 4 * lanes + r, words[part]);
  }
}

// Eight of each sixteen of REGISTER numbers, of four keys, to two registers of fours: the first
// eight or, if LATTER, the second. at: what lies between the first key and each.
template <bool LATTER>
INLINE void turn_values(const char *values, const int64_t *at, __mmask64 some, I32 *fours) {
  __m512i row[4], pairs[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi8(some, values + at[i]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    pairs[i] = LATTER ? _mm512_unpackhi_epi8(row[2 * i], row[2 * i + 1])
                      : _mm512_unpacklo_epi8(row[2 * i], row[2 * i + 1]);
  fours[0] = (I32)_mm512_unpacklo_epi16(pairs[0], pairs[1]);
  fours[1] = (I32)_mm512_unpackhi_epi16(pairs[0], pairs[1]);
}

// Where fours of values come from: rows, and are not needed again; rows, and are left in
// digits.values; or from there.
enum Fours { ONCE, FIRST, AGAIN };

// out[m][d] = step[m] * sum of weights * values, of M rows from r on, and of the numbers that
// `turn_values` turns. values: at the first of all; left: of a row, from there on. Words of
// weights: row_words from row to row, key_words from four keys to the next.
template <int M, bool LATTER, bool FETCHES, Fours HOW>
static void weigh_bytes(const Digits &digits, int64_t r, int64_t row_words, int64_t key_words,
                        const char *values, int64_t stride, int64_t left, int64_t keys, float *out,
                        int64_t out_stride, Later *later) {
  Later fetched = *later;
  I32 sums[2][M][2] = {};
  const __mmask64 some = some_bytes(left);
  const int32_t *weights[2] = {digits.weights[0] + r * row_words,
                               digits.weights[1] + r * row_words};
  int64_t at[4] = {0, stride, 2 * stride, 3 * stride};
  uint8_t *kept = digits.values;
  for (int64_t j = 0; j < keys; j += 4, values += 4 * stride, kept += 2 * REGISTER) {
    I32 fours[2];
    if (HOW == AGAIN) {
      fours[0] = load<I32>(kept), fours[1] = load<I32>(kept + REGISTER);
    } else {
      if (keys - j < 4)  // the last one again after it: its weight is 0 there
        for (int64_t i = keys - j; i < 4; i++) at[i] = (keys - j - 1) * stride;
      turn_values<LATTER>(values, at, some, fours);
      if (HOW == FIRST) store(kept, fours[0]), store(kept + REGISTER, fours[1]);
    }
    if (FETCHES) fetched.fetch();
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const I32 weight = word(weights[part] + m * row_words);
        sums[part][m][0] = plus_fours(sums[part][m][0], weight, fours[0]);
        sums[part][m][1] = plus_fours(sums[part][m][1], weight, fours[1]);
      }
    weights[0] += key_words, weights[1] += key_words;
  }
  *later = fetched;
  // Four numbers of each sixteen lie side by side.
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      float four[LANES];
      store(four, of_digits(sums[0][m][i], sums[1][m][i]) * digits.weight_steps[r + m]);
      for (int quarter = 0; quarter < 4; quarter++) {
        const int64_t d = 16 * quarter + 8 * LATTER + 4 * i;
        if (d < left) memcpy(out + m * out_stride + d, four + 4 * quarter, 4 * sizeof(float));
      }
    }
}

// The values of a span, weighted, of all heads of a tile; which are not yet where out is. weights:
// as of `weigh_values`. FEW queries wait for memory: the next span's keys are fetched meanwhile.
template <bool FEW>
static void weigh_values_in_bytes(const toast::Attention &a, const toast::Tile &tile,
                                  int64_t begin, int64_t keys, float *weights, int64_t lanes,
                                  int64_t head_weights, const Digits &digits, float *out) {
  const toast_rows &values = a.call->values;
  const int64_t size = a.call->value_size, stride = values.strides[2];
  const int64_t row_words = FEW ? FOURS : 1, key_words = FEW ? 1 : lanes;
  int64_t goes = 0;
  in_tiles(tile.rows, [&]<int M>(int64_t) { goes += 2 * ((size + REGISTER - 1) / REGISTER); });
  Later later = keys_after(a, tile, begin + keys, tile.heads * goes * ((keys + 3) / 4));
  for (int64_t h = 0; h < tile.heads; h++) {
    const char *from = row_of(values, tile.batch, tile.head + h, begin);
    for (int64_t j = 0; j < keys; j++) digits.scales[j] = scale_of(from + j * stride, size);
    for (int64_t j = keys; j % LANES; j++) digits.scales[j] = 0;
    for (int64_t r = 0; !FEW && r < tile.rows; r += LANES)
      put_weights_of_lanes(digits, r, weights + r, lanes, keys);
    for (int64_t r = 0; FEW && r < tile.rows; r++)
      put_weights_of_row(digits, r, weights + r * SCORES_STRIDE, keys);
    auto weigh_part = [&]<bool LATTER>(int64_t d) {
      in_tiles(tile.rows, [&]<int M>(int64_t r) {
        const bool again = r > 0, last = r + M == tile.rows;
        auto weigh = again  ? weigh_bytes<M, LATTER, FEW, AGAIN>
                     : last ? weigh_bytes<M, LATTER, FEW, ONCE>
                            : weigh_bytes<M, LATTER, FEW, FIRST>;
        weigh(digits, r, row_words, key_words, from + d, stride, size - d, keys,
              out + r * a.row_floats + d, a.row_floats, &later);
      });
    };
    for (int64_t d = 0; d < size; d += REGISTER)
      weigh_part.template operator()<false>(d), weigh_part.template operator()<true>(d);
    weights += head_weights, out += tile.rows * a.row_floats;
  }
}
#else
template <bool FEW, class... Rest>
INLINE void weigh_values_in_bytes(const Rest &...) {}
#endif

}  // namespace
