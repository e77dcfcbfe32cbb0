// Attention of a tile over a span of keys, in float32. Lanes are queries if they are many, keys if
// few, with the same bits.
#pragma once

#include <string.h>

#include "attention_values.h"
#include "attention_weights.h"

namespace {

// weights_of_row for LANES rows side by side: scores (keys, LANES), `stride` apart.
static void weights_of_lanes(float *scores, int64_t keys, int64_t stride, float *max,
                             float *total, int64_t total_stride, int rows) {
  F32 peaks = splat(-FLT_MAX);
  for (int64_t j = 0; j < keys; j++) {
    F32 score = load<F32>(scores + j * stride);
    peaks = maximum(score, peaks);
  }
  F32 sums[SUM_CHAINS];
  for (int i = 0; i < SUM_CHAINS; i++) sums[i] = F32{};
  for (int64_t j = 0; j < keys; j += SUM_CHAINS)
    for (int i = 0; i < SUM_CHAINS && j + i < keys; i++) {
      F32 weight = exponential(load<F32>(scores + (j + i) * stride) - peaks);
      store(scores + (j + i) * stride, weight);
      sums[i] += weight;
    }
  for (int i = 1; i < SUM_CHAINS; i++) sums[0] += sums[i];
  for (int r = 0; r < rows; r++) max[r] = peaks[r], total[r * total_stride] = sums[0][r];
}

// Few queries; N: padded_rows of a head.
template <int TYPE, int N>
static void scores_of_few(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                          int64_t end, const Workspace &space) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, row = value_floats(size) + LANES;
  for (int64_t h = 0; h < tile.heads; h++)
    for (int64_t d = 0; d < size; d += LANES) {
      F32 numbers[N];
      for (int n = 0; n < N; n++) numbers[n] = query_floats(a, tile.of_head(h), n, d);
      if constexpr (TRANSPOSED<N>) transpose(numbers);
      float *to = space.queries + h * N * row;
      for (int n = 0; n < N; n++)
        store(to + (TRANSPOSED<N> ? (d + n) * N : n * row + d), numbers[n]);
    }
  const int64_t stride = call.keys.strides[2] * Dtype<TYPE>::SIZE, bytes = row_bytes<TYPE>(size);
  const char *keys = row_of(call.keys, tile.batch, tile.head, begin);
  const char *values = row_of(call.values, tile.batch, tile.head, begin);
  const int64_t distance = keys_ahead(tile.heads), count = end - begin;
  // After the last keys of all, prefetch the span's values.
  const int64_t before = end == call.key_positions ? count - distance : count;
  const int64_t tail = before > 0 ? (before + LANES - 1) / LANES * LANES : 0;
  const int64_t value_size = toast_type_bytes(call.values.type);
  const int64_t value_bytes = call.value_size * value_size;
  const int64_t value_stride = call.values.strides[2] * value_size;
  if (begin == a.origin[tile.batch])  // later spans have been prefetched by the one before
    RowPrefetch::of(keys, 0, (count < distance ? count : distance) * tile.heads * bytes,
                    tile.heads * bytes, stride).fetch();
  for (int64_t j = 0; j < end - begin; j += LANES)
    for (int64_t h = 0; h < tile.heads; h++) {
      const char *rows[LANES];  // missing ones repeat the last
      for (int i = 0; i < LANES; i++)
        rows[i] = keys + (j + i < end - begin ? j + i : end - begin - 1) * stride + h * bytes;
      const RowPrefetch ahead =
          j < tail ? RowPrefetch::of(keys + (j + distance) * stride, h * LANES * bytes,
                                     LANES * 4 * LANES, tile.heads * bytes, stride)
                   : RowPrefetch::of(values + (j - tail) * value_stride, h * LANES * value_bytes,
                                     LANES * 4 * LANES, tile.heads * value_bytes, value_stride);
      dot_keys<TYPE, N>(rows, ahead, space.queries + h * N * row, row, size,
                        space.scores + h * N * SCORES_STRIDE + j, SCORES_STRIDE);
    }
}

// A tile's queries transposed to columns, times `scale`.
template <int TYPE>
static void transpose_queries(const toast::Attention &a, const toast::Tile &tile, int vectors,
                              float *columns) {
  for (int v = 0; v < vectors; v++) {
    const char *rows[LANES];
    for (int i = 0; i < LANES; i++) {
      const int64_t r = v * LANES + i;
      rows[i] = query_of(a, tile, r < tile.rows ? r : tile.rows - 1);
    }
    transpose_rows<TYPE>(rows, a.call->key_size, RowPrefetch{rows[0], 0, 0, 0},
                         [&](int64_t d, F32 column) {
      store(columns + (d * vectors + v) * LANES, column * a.call->scale);
    });
  }
}

static void scores_of_many(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                           int64_t end, int vectors, const Workspace &space) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, row = value_floats(size) + LANES;
  const int64_t number = toast_type_bytes(call.keys.type), stride = call.keys.strides[2] * number;
  auto transpose_all = call.queries.type == TOAST_F32   ? transpose_queries<TOAST_F32>
                       : call.queries.type == TOAST_F16 ? transpose_queries<TOAST_F16>
                                                        : transpose_queries<TOAST_BF16>;
  transpose_all(a, tile, vectors, space.queries);
  for (int64_t j = begin; j < end; j += DOT_ROWS) {
    const int64_t count = end - j < DOT_ROWS ? end - j : DOT_ROWS;
    const char *keys = row_of(call.keys, tile.batch, tile.head, j);
    float *to = space.scores + (j - begin) * vectors * LANES;
    for (int64_t n = 0; n < count; n++)
      for (int64_t at = 0; at < size * number; at += LINE)
        __builtin_prefetch(keys + (n + KEYS_AHEAD) * stride + at);
    if (call.keys.type == TOAST_F32) {
      dot_all(vectors, space.queries, reinterpret_cast<const float *>(keys),
              call.keys.strides[2], count, size, to);
      continue;
    }
    for (int64_t n = 0; n < count; n++)
      for (int64_t d = 0; d < size; d += LANES)
        store(space.keys + n * row + d,
              floats_of_row(call.keys.type, keys + n * stride, size, d));
    dot_all(vectors, space.queries, space.keys, row, count, size, to);
  }
}

static void weigh_values(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                         int64_t keys, const float *weights, int64_t weight_stride,
                         int64_t key_stride, int64_t head_weights, float *out) {
  const toast_rows &values = a.call->values;
  const char *from = row_of(values, tile.batch, tile.head, begin);
  dispatch_type(values.type, [&]<int TYPE>() {
    constexpr bool MANY = MANY_ROWS > FEW_ROWS;
    auto weigh = MANY && weight_stride == 1 ? weigh_all<TYPE, MANY> : weigh_all<TYPE, false>;
    weigh(weights, weight_stride, key_stride, head_weights, from,
          values.strides[2] * Dtype<TYPE>::SIZE, keys, tile.heads, tile.rows, a.call->value_size,
          out, a.row_floats);
  });
}

static bool attend_span(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, toast::Partial out) {
  const toast_attention &call = *a.call;
  const int64_t keys = end - begin, total = value_floats(call.value_size);
  const int needed = int((tile.rows + LANES - 1) / LANES), vectors = needed == 3 ? 4 : needed;
  const bool few = are_few(a.rows);
  Workspace space;
  Int8Workspace digits;
  if (!make_workspace(a, &space)) return false;
  const bool int8_keys = is_int8(call.keys), int8_values = is_int8(call.values);
  if ((int8_keys || int8_values) && !make_int8_workspace(a, &digits)) return false;
  const int64_t sums = tile.rows * a.row_floats;  // per head
  memset(out.sums, 0, tile.heads * sums * sizeof(float));
  // Strides of scores by row, key and head.
  const int64_t row_stride = few ? SCORES_STRIDE : 1, stride = few ? 1 : vectors * LANES;
  const int64_t head_stride = few ? padded_rows(tile.rows) * SCORES_STRIDE : 0;
  if (int8_keys) {
    scores_int8(a, tile, begin, end, few ? 0 : vectors, space, digits);
  } else if (few) {
    dispatch_type(call.keys.type, [&]<int TYPE>() {
      dispatch_rows(tile.rows,
                    [&]<int N>() { scores_of_few<TYPE, N>(a, tile, begin, end, space); });
    });
  } else {
    scores_of_many(a, tile, begin, end, vectors, space);
  }
  float *totals = out.sums + total;
  for (int64_t h = 0; h < tile.heads; h++)
    mask_scores(a, tile.of_head(h), begin, end, space.scores + h * head_stride, row_stride, stride);
  for (int64_t i = 0; few && i < tile.heads * tile.rows; i++)
    weights_of_row(space.scores + i / tile.rows * head_stride + i % tile.rows * row_stride, keys,
                   out.max + i, totals + i * a.row_floats, [] {});
  for (int64_t r = 0; !few && r < tile.rows; r += LANES)
    weights_of_lanes(space.scores + r, keys, stride, out.max + r, totals + r * a.row_floats,
                     a.row_floats, int(tile.rows - r < LANES ? tile.rows - r : LANES));
  if (int8_values && few) {
    weigh_values_int8<true>(a, tile, begin, keys, space.scores, 0, head_stride, digits,
                            out.sums);
  } else if (int8_values) {
    weigh_values_int8<false>(a, tile, begin, keys, space.scores, stride, 0, digits, out.sums);
  } else {
    weigh_values(a, tile, begin, keys, space.scores, row_stride, stride, head_stride, out.sums);
  }
  return true;
}

const toast::AttentionCode attention = {
    [](const toast::Attention &a) { return are_few(a.rows) ? a.rows : int64_t(TILE_QUERIES); },
    [](const toast::Attention &a) {
      return are_few(a.rows) ? TILE_QUERIES / padded_rows(a.rows) : int64_t(1);
    },
    row_floats,
    prepared_bytes,
    prepare,
    attend_span,
    merge_partials,
    finish_rows,
};

}  // namespace
