// Scores to softmax weights, and merging partial results, in float32.
#pragma once

#include <float.h>
#include <math.h>

#include "attention_room.h"
#include "functions.h"

namespace {

constexpr int SUM_CHAINS = toast::SUM_CHAINS;  // on every processor

INLINE float exponential(float x) { return exponential(splat(x))[0]; }

// Logit soft-cap cap * tanh(score / cap), in place. If keys have a stride, rows are contiguous.
static void cap_scores(float cap, int64_t rows, int64_t keys, float *scores, int64_t row_stride,
                       int64_t stride) {
  const int64_t lines = stride == 1 ? rows : keys, count = stride == 1 ? keys : rows;
  for (int64_t i = 0; i < lines; i++) {
    float *line = scores + i * (stride == 1 ? row_stride : stride);
    for (int64_t j = 0; j < count; j += LANES) {
      const int some = int(count - j < LANES ? count - j : LANES);
      const F32 power = exponential(some_floats_at(TOAST_F32, line, j, some) * splat(2 / cap));
      put_some(TOAST_F32, line, j, splat(cap) - splat(2 * cap) / (power + splat(1.0f)), some);
    }
  }
}

// Soft-caps a tile's scores of keys [begin, end), then applies the mask. stride: from one key's
// score to the next.
static void mask_scores(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, float *scores, int64_t row_stride, int64_t stride) {
  const toast_attention &call = *a.call;
  if (call.cap > 0) cap_scores(call.cap, tile.rows, end - begin, scores, row_stride, stride);
  for (int64_t r = 0; r < tile.rows; r++) {
    const int64_t row = tile.first + r, position = row / a.repeats;
    const int64_t head = tile.head * a.repeats + row % a.repeats;
    const toast::Range range = a.range(tile.batch, head, position);
    float *row_scores = scores + r * row_stride;
    const int64_t first = range.first > begin ? range.first : begin;
    const int64_t after = range.last + 1 < end ? range.last + 1 : end;
    for (int64_t j = begin; j < end && j < first; j++) row_scores[(j - begin) * stride] = -INFINITY;
    for (int64_t j = after > begin ? after : begin; j < end; j++)
      row_scores[(j - begin) * stride] = -INFINITY;
    if (call.masking < TOAST_VISIBLE) continue;
    const int64_t at = tile.batch * call.mask_strides[0] + head * call.mask_strides[1] +
                       position * call.mask_strides[2];
    if (call.masking == TOAST_ADDED) {
      auto added = static_cast<const char *>(call.mask) + at * toast_type_bytes(call.mask_type);
      for (int64_t j = first; j < after; j++)
        row_scores[(j - begin) * stride] += some_floats_at(call.mask_type, added, j, 1)[0];
    } else if (range.kind == toast::Range::EMPTY) {
      for (int64_t j = begin; j < end; j++) row_scores[(j - begin) * stride] = -FLT_MAX;
    } else if (range.kind == toast::Range::HOLES) {
      auto visible = static_cast<const uint8_t *>(call.mask) + at;
      for (int64_t j = first; j < after; j++)
        if (!visible[j]) row_scores[(j - begin) * stride] = -INFINITY;
    }
  }
}

// Adds up the chains, in order.
INLINE float sum_chains(const float *sums) {
  float sum = sums[0];
  for (int i = 1; i < SUM_CHAINS; i++) sum += sums[i];
  return sum;
}

// Turns a row's scores, (keys), into weights exp(score - max), in place; *max, and *total, the sum
// of weights. between() is called once per SUM_CHAINS keys.
template <class Between>
INLINE void weights_of_row(float *scores, int64_t keys, float *max, float *total,
                           const Between &between) {
  int64_t padded = (keys + SUM_CHAINS - 1) / SUM_CHAINS * SUM_CHAINS;
  for (int64_t j = keys; j < padded; j++) scores[j] = -INFINITY;
  F32 peaks = splat(-FLT_MAX);
  for (int64_t j = 0; j < padded; j += LANES) {
    F32 score = load<F32>(scores + j);
    peaks = maximum(score, peaks);
  }
  const float peak = horizontal_max(peaks);
  constexpr int PARTS = SUM_CHAINS / LANES;
  F32 sums[PARTS];
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) sums[i] = F32{};
  for (int64_t j = 0; j < padded; j += SUM_CHAINS) {
    between();
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
      F32 weight = exponential(load<F32>(scores + j + i * LANES) - splat(peak));
      store(scores + j + i * LANES, weight);
      sums[i] += weight;
    }
  }
  float all_sums[SUM_CHAINS];
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) store(all_sums + i * LANES, sums[i]);
  *max = peak;
  *total = sum_chains(all_sums);
}

static int64_t row_floats(int64_t value_size) { return value_floats(value_size) + LANES; }

// Two loops, as one could be contracted to FMAs in two ways.
static void merge_partials(const toast::Attention &a, int64_t rows, toast::Partial to,
                           toast::Partial from) {
  for (int64_t r = 0; r < rows; r++) {
    const float max = to.max[r] < from.max[r] ? from.max[r] : to.max[r];
    const F32 before = splat(exponential(to.max[r] - max));
    const F32 after = splat(exponential(from.max[r] - max));
    float *sums = to.sums + r * a.row_floats, *later = from.sums + r * a.row_floats;
    for (int64_t d = 0; d < a.row_floats; d += LANES)
      store(later + d, load<F32>(later + d) * after);
    for (int64_t d = 0; d < a.row_floats; d += LANES)
      store(sums + d, multiply_add(load<F32>(sums + d), before, load<F32>(later + d)));
    to.max[r] = max;
  }
}

static void finish_rows(const toast::Attention &a, const toast::Tile &tile, toast::Partial sums) {
  const toast_attention &call = *a.call;
  const int64_t total = value_floats(call.value_size);
  for (int64_t i = 0; i < tile.heads * tile.rows; i++) {
    const int64_t row = tile.first + i % tile.rows;
    const int64_t head = (tile.head + i / tile.rows) * a.repeats + row % a.repeats;
    float *row_sums = sums.sums + i * a.row_floats;
    float weight = row_sums[total], factor = 1;
    if (call.sinks) {
      const float sink = call.sinks[head], max = sums.max[i] < sink ? sink : sums.max[i];
      factor = exponential(sums.max[i] - max);
      weight = weight * factor + exponential(sink - max);
    }
    const int64_t at = tile.batch * a.out_strides[0] + head * a.out_strides[1] +
                       row / a.repeats * a.out_strides[2];
    for (int64_t d = 0; d < call.value_size; d += LANES)
      put_some(a.out_type, a.out, at + d, load<F32>(row_sums + d) * factor / weight,
               int(call.value_size - d < LANES ? call.value_size - d : LANES));
  }
}

}  // namespace
