// Attention of some queries over a span of keys, in float32. Lanes are queries where there are
// many, keys where there are few: which changes no bit.
#pragma once

#include <float.h>
#include <math.h>

#include "attention.h"
#include "attention_products.h"
#include "functions.h"
#include "product.h"

namespace {

constexpr int SUMMED = 16;  // chains that weights are added up in, on every processor
constexpr int64_t SCORES_STRIDE = toast::SPAN;  // of a query, where queries are few

INLINE float exponential(float x) { return exponential(all(x))[0]; }

INLINE const char *row_of(const toast_rows &rows, int64_t batch, int64_t head, int64_t position) {
  const int64_t at = batch * rows.strides[0] + head * rows.strides[1] + position * rows.strides[2];
  return static_cast<const char *>(rows.data) + at * (rows.type == TOAST_F32 ? 4 : 2);
}

// The scores of rows that hide or change keys of a span. stride: from one key's score to the next.
static void mask_scores(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, float *scores, int64_t row_stride, int64_t stride) {
  const toast_attention &call = *a.call;
  for (int64_t r = 0; r < tile.rows; r++) {
    const int64_t row = tile.first + r, position = row / a.repeats;
    const int64_t head = tile.head * a.repeats + row % a.repeats;
    const toast::Range range = a.range(tile.batch, head, position);
    float *of = scores + r * row_stride;
    const int64_t first = range.first > begin ? range.first : begin;
    const int64_t after = range.last + 1 < end ? range.last + 1 : end;
    for (int64_t j = begin; j < end && j < first; j++) of[(j - begin) * stride] = -INFINITY;
    for (int64_t j = after > begin ? after : begin; j < end; j++)
      of[(j - begin) * stride] = -INFINITY;
    if (call.masking < TOAST_VISIBLE) continue;
    const int64_t at = tile.batch * call.mask_strides[0] + head * call.mask_strides[1] +
                       position * call.mask_strides[2];
    if (call.masking == TOAST_ADDED) {
      const bool wide = call.mask_type == TOAST_F32;
      const char *added = static_cast<const char *>(call.mask) + at * (wide ? 4 : 2);
      for (int64_t j = first; j < after; j++)
        of[(j - begin) * stride] += some_numbers_at(call.mask_type, added, j, 1)[0];
    } else if (range.kind == toast::Range::BLIND) {
      for (int64_t j = begin; j < end; j++) of[(j - begin) * stride] = -FLT_MAX;
    } else if (range.kind == toast::Range::HOLES) {
      auto visible = static_cast<const uint8_t *>(call.mask) + at;
      for (int64_t j = first; j < after; j++)
        if (!visible[j]) of[(j - begin) * stride] = -INFINITY;
    }
  }
}

// Sixteen sums of every sixteenth weight, in their order.
INLINE float in_order(const float *sums) {
  float sum = sums[0];
  for (int i = 1; i < SUMMED; i++) sum += sums[i];
  return sum;
}

// Scores of one row to weights, (keys,); the largest score, and the sum of the weights.
static void weights_of_row(float *scores, int64_t keys, float *most, float *total) {
  int64_t padded = (keys + SUMMED - 1) / SUMMED * SUMMED;
  for (int64_t j = keys; j < padded; j++) scores[j] = -INFINITY;
  F32 peaks = all(-FLT_MAX);
  for (int64_t j = 0; j < padded; j += LANES) {
    F32 score = load<F32>(scores + j);
    peaks = score > peaks ? score : peaks;
  }
  float peak = peaks[0];
  for (int i = 1; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
  constexpr int PARTS = SUMMED / LANES;
  F32 sums[PARTS];
  for (int i = 0; i < PARTS; i++) sums[i] = F32{};
  for (int64_t j = 0; j < padded; j += SUMMED)
    for (int i = 0; i < PARTS; i++) {
      F32 weight = exponential(load<F32>(scores + j + i * LANES) - all(peak));
      store(scores + j + i * LANES, weight);
      sums[i] += weight;
    }
  float all_sums[SUMMED];
  for (int i = 0; i < PARTS; i++) store(all_sums + i * LANES, sums[i]);
  *most = peak;
  *total = in_order(all_sums);
}

// The same of LANES rows side by side, (keys, WIDE).
static void weights_of_lanes(float *scores, int64_t keys, float *most, float *total,
                             int64_t total_stride, int rows) {
  F32 peaks = all(-FLT_MAX);
  for (int64_t j = 0; j < keys; j++) {
    F32 score = load<F32>(scores + j * WIDE);
    peaks = score > peaks ? score : peaks;
  }
  F32 sums[SUMMED];
  for (int i = 0; i < SUMMED; i++) sums[i] = F32{};
  for (int64_t j = 0; j < keys; j += SUMMED)
    for (int i = 0; i < SUMMED && j + i < keys; i++) {
      F32 weight = exponential(load<F32>(scores + (j + i) * WIDE) - peaks);
      store(scores + (j + i) * WIDE, weight);
      sums[i] += weight;
    }
  for (int i = 1; i < SUMMED; i++) sums[0] += sums[i];
  for (int r = 0; r < rows; r++) most[r] = peaks[r], total[r * total_stride] = sums[0][r];
}

INLINE bool are_few(int64_t rows) { return rows * 4 < LANES * 3; }

INLINE int64_t value_floats(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// A thread's memory for a span: floats of each part of it.
struct Room {
  float *queries, *columns, *keys, *scores;
};

INLINE bool make_room(const toast::Attention &a, bool few, Room *room) {
  const int64_t size = a.call->key_size, wide = size * WIDE;
  const int64_t scores = toast::SPAN * WIDE, keys = TILE_M * (size + LANES);
  // Where rows are few: they themselves, and columns of keys; else columns of them, and keys.
  const int64_t floats = wide + scores + keys + (few ? LANES * (size + LANES) : 0);
  auto memory = static_cast<float *>(toast::scratch(toast::SCORES, floats * sizeof(float)));
  if (!memory) return false;
  *room = {memory + wide + scores + keys, memory, memory + wide + scores, memory + wide};
  return true;
}

template <int TYPE>
static void scores_of_few(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                          int64_t end, const Room &room) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size;
  for (int64_t r = 0; r < tile.rows; r++) {
    const int64_t row = tile.first + r;
    const char *query = row_of(call.queries, tile.batch, tile.head * a.repeats + row % a.repeats,
                               row / a.repeats);
    for (int64_t d = 0; d < size; d += LANES)
      store(room.queries + r * (size + LANES) + d,
            some_numbers_at(call.queries.type, query, d, int(size - d)) * call.scale);
  }
  for (int64_t j = begin; j < end; j += WIDE) {
    const int count = int(end - j < WIDE ? end - j : WIDE);
    turn<TYPE>(row_of(call.keys, tile.batch, tile.head, j), call.keys.strides[2], count, size, 1,
               room.columns);
    cross_all(4, room.columns, room.queries, size + LANES, tile.rows, size,
              room.scores + (j - begin), SCORES_STRIDE);
  }
}

// The queries of a tile as columns, scaled.
static void turn_queries(const toast::Attention &a, const toast::Tile &tile, float *columns) {
  const toast_attention &call = *a.call;
  for (int64_t r = 0; r < WIDE; r++) {
    const int64_t row = tile.first + r, head = tile.head * a.repeats + row % a.repeats;
    const char *query = row_of(call.queries, tile.batch, head, row / a.repeats);
    for (int64_t d = 0; d < call.key_size; d++)
      columns[d * WIDE + r] =
          r < tile.rows
              ? some_numbers_at(call.queries.type, query, d, 1)[0] * call.scale
              : 0;
  }
}

static void scores_of_many(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                           int64_t end, int vectors, const Room &room) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, stride = call.keys.strides[2];
  turn_queries(a, tile, room.columns);
  for (int64_t j = begin; j < end; j += TILE_M) {
    const int64_t count = end - j < TILE_M ? end - j : TILE_M;
    const char *keys = row_of(call.keys, tile.batch, tile.head, j);
    float *to = room.scores + (j - begin) * WIDE;
    if (call.keys.type == TOAST_F32) {
      cross_all(vectors, room.columns, reinterpret_cast<const float *>(keys), stride, count, size,
                to, WIDE);
      continue;
    }
    for (int64_t n = 0; n < count; n++)
      for (int64_t d = 0; d < size; d += LANES)
        store(room.keys + n * (size + LANES) + d,
              some_numbers_at(call.keys.type, keys + n * stride * 2, d, int(size - d)));
    cross_all(vectors, room.columns, room.keys, size + LANES, count, size, to, WIDE);
  }
}

static void weigh_values(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                         int64_t keys, const float *weights, int64_t weight_stride,
                         int64_t key_stride, float *out) {
  const toast_rows &values = a.call->values;
  const char *from = row_of(values, tile.batch, tile.head, begin);
  auto of = values.type == TOAST_F32   ? weigh_all<TOAST_F32>
            : values.type == TOAST_F16 ? weigh_all<TOAST_F16>
                                       : weigh_all<TOAST_BF16>;
  of(weights, weight_stride, key_stride, from, values.strides[2], keys, tile.rows,
     a.call->value_size, out, a.row_floats);
}

static bool attend_span(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, toast::Sums out) {
  const toast_attention &call = *a.call;
  const int64_t keys = end - begin, total = value_floats(call.value_size);
  const bool few = are_few(a.rows);
  Room room;
  if (!make_room(a, few, &room)) return false;
  for (int64_t r = 0; r < tile.rows; r++)
    store(out.sums + r * a.row_floats + total, F32{});  // the sum of weights comes first in it
  if (few) {
    auto of = call.keys.type == TOAST_F32   ? scores_of_few<TOAST_F32>
              : call.keys.type == TOAST_F16 ? scores_of_few<TOAST_F16>
                                            : scores_of_few<TOAST_BF16>;
    of(a, tile, begin, end, room);
    mask_scores(a, tile, begin, end, room.scores, SCORES_STRIDE, 1);
    for (int64_t r = 0; r < tile.rows; r++)
      weights_of_row(room.scores + r * SCORES_STRIDE, keys, out.most + r,
                     out.sums + r * a.row_floats + total);
    weigh_values(a, tile, begin, keys, room.scores, SCORES_STRIDE, 1, out.sums);
    return true;
  }
  const int needed = int((tile.rows + LANES - 1) / LANES), vectors = needed == 3 ? 4 : needed;
  scores_of_many(a, tile, begin, end, vectors, room);
  mask_scores(a, tile, begin, end, room.scores, 1, WIDE);
  for (int64_t r = 0; r < tile.rows; r += LANES)
    weights_of_lanes(room.scores + r, keys, out.most + r, out.sums + r * a.row_floats + total,
                     a.row_floats, int(tile.rows - r < LANES ? tile.rows - r : LANES));
  weigh_values(a, tile, begin, keys, room.scores, 1, WIDE, out.sums);
  return true;
}

// In two loops, so that there is one way to round it.
static void add_sums(const toast::Attention &a, int64_t rows, toast::Sums to, toast::Sums from) {
  for (int64_t r = 0; r < rows; r++) {
    const float most = to.most[r] < from.most[r] ? from.most[r] : to.most[r];
    const F32 before = all(exponential(to.most[r] - most));
    const F32 after = all(exponential(from.most[r] - most));
    float *sums = to.sums + r * a.row_floats, *more = from.sums + r * a.row_floats;
    for (int64_t d = 0; d < a.row_floats; d += LANES) store(more + d, load<F32>(more + d) * after);
    for (int64_t d = 0; d < a.row_floats; d += LANES)
      store(sums + d, multiply_add(load<F32>(sums + d), before, load<F32>(more + d)));
    to.most[r] = most;
  }
}

static void finish_rows(const toast::Attention &a, const toast::Tile &tile, toast::Sums sums) {
  const toast_attention &call = *a.call;
  const int64_t total = value_floats(call.value_size);
  for (int64_t r = 0; r < tile.rows; r++) {
    const int64_t row = tile.first + r, head = tile.head * a.repeats + row % a.repeats;
    float *of = sums.sums + r * a.row_floats;
    float weight = of[total], factor = 1;
    if (call.sinks) {
      const float sink = call.sinks[head], most = sums.most[r] < sink ? sink : sums.most[r];
      factor = exponential(sums.most[r] - most);
      weight = weight * factor + exponential(sink - most);
    }
    const int64_t at = tile.batch * a.out_strides[0] + head * a.out_strides[1] +
                       row / a.repeats * a.out_strides[2];
    for (int64_t d = 0; d < call.value_size; d++)
      put(a.out_type, a.out, at + d, of[d] * factor / weight);
  }
}

const toast::AttentionCode attention = {
    [](int64_t rows) { return are_few(rows) ? rows : int64_t(WIDE); },
    [](int64_t value_size) { return value_floats(value_size) + LANES; },
    attend_span,
    add_sums,
    finish_rows,
};

}  // namespace
