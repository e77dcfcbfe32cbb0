// Products in float32. Activations are copied, widened; of the weights a few rows at a time are,
// unless one vector meets them: then a weight is widened as it is multiplied, which is the same.
#pragma once

#include "unpack.h"

namespace {

constexpr int64_t PREFETCH = 4096;       // bytes ahead of what is multiplied
constexpr int64_t AT_HAND = 256 << 10;   // bytes of rows that many vectors meet in turn
constexpr int MOST_ROWS = 16;            // a multiple of every TILE_N

INLINE int64_t padded(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

// One odd cache line more: rows that are a power of two apart would fall into the same places.
INLINE int64_t float_row(int64_t columns) { return padded(columns) + LANES; }

INLINE int rows_at_hand(int64_t stride) {
  int64_t rows = AT_HAND / (stride * int64_t(sizeof(float))) / TILE_N * TILE_N;
  return int(rows < TILE_N ? TILE_N : rows > MOST_ROWS ? MOST_ROWS : rows);
}

INLINE int64_t floats_bytes(const toast::Product &p) {
  return float_row(p.matrix->columns) * sizeof(float);
}

INLINE float *float_vector(const toast::Product &p, int64_t row) {
  return reinterpret_cast<float *>(p.prepared + row * p.prepared_stride);
}

INLINE void prepare_floats(const toast::Product &p, int64_t row) {
  const toast_vectors &x = *p.x;
  const int64_t columns = p.matrix->columns;
  float *out = float_vector(p, row);
  for (int64_t k = 0; k < columns; k += LANES)
    store(out + k, some_numbers_at(x.type, x.data, row * x.stride + k, int(columns - k)));
}

// out[i][j] = a[i] . b[j] for M x N rows: each a chain of its own, lane by lane, then over lanes.
template <int TYPE, int M, int N>
INLINE void dots(const float *const *a, const void *const *b, int64_t columns, float (*out)[N]) {
  F32 sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = F32{};
  int64_t k = 0;
  for (; k + LANES <= columns; k += LANES) {
    F32 row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      row[j] = Numbers<TYPE>::at(b[j], k);
      if (M == 1)
        __builtin_prefetch(static_cast<const char *>(b[j]) + k * Numbers<TYPE>::SIZE + PREFETCH);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      F32 x = load<F32>(a[i] + k);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = multiply_add(x, row[j], sums[i][j]);
    }
  }
  if (k < columns)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      F32 row = Numbers<TYPE>::some(b[j], k, int(columns - k));
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
        sums[i][j] = multiply_add(load<F32>(a[i] + k), row, sums[i][j]);
    }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) out[i][j] = sum(sums[i][j]);
}

// M members of a group with N rows that are at hand, which are from `first` on.
template <int TYPE, int M, int N>
INLINE void tile(const toast::Product &p, const uint32_t *places, const void *const *rows,
                 int64_t first) {
  const toast_matrix &m = *p.matrix;
  const float *vectors[M];
  float out[M][N];
  for (int i = 0; i < M; i++)
    vectors[i] = float_vector(p, p.vector ? p.vector[places[i]] : places[i]);
  dots<TYPE, M, N>(vectors, rows, m.columns, out);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) put(p.out_type, p.out, places[i] * m.rows + first + j, out[i][j]);
}

// M members with all rows that are at hand.
template <int M>
INLINE void tiles(const toast::Product &p, const uint32_t *places, const void *const *rows,
                  int64_t first, int count) {
  int n = 0;
  for (; n + TILE_N <= count; n += TILE_N)
    tile<TOAST_F32, M, TILE_N>(p, places, rows + n, first + n);
  for (; n < count; n++) tile<TOAST_F32, M, 1>(p, places, rows + n, first + n);
}

// One vector with rows as they are stored, one after another, as memory likes it.
template <int TYPE>
static void multiply_stored(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end) {
  for (int64_t n = first; n < end; n++) {
    const void *row = row_at(*p.matrix, group.expert * p.matrix->rows + n);
    tile<TYPE, 1, 1>(p, group.places, &row, n);
  }
}

static bool multiply_floats(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end) {
  const toast_matrix &m = *p.matrix;
  if (!m.bits && group.members == 1) {
    if (m.type == TOAST_F32) {
      multiply_stored<TOAST_F32>(p, group, first, end);
    } else if (m.type == TOAST_F16) {
      multiply_stored<TOAST_F16>(p, group, first, end);
    } else {
      multiply_stored<TOAST_BF16>(p, group, first, end);
    }
    return true;
  }
  const bool widens = m.bits || m.type != TOAST_F32;
  const int64_t stride = float_row(m.columns);
  int most = group.members == 1 ? TILE_N : rows_at_hand(stride);
  float *wide = nullptr;
  uint8_t *bytes = nullptr;
  if (widens) {
    wide = static_cast<float *>(toast::scratch(toast::ROWS, most * stride * sizeof(float)));
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, m.columns));
    if (!wide || !bytes) return false;
  }
  for (int64_t n = first; n < end; n += most) {
    const int count = int(end - n < most ? end - n : most);
    const void *rows[MOST_ROWS];
    for (int j = 0; j < count; j++) {
      const int64_t row = group.expert * m.rows + n + j;
      if (widens) widen_row(m, row, bytes, wide + j * stride);
      rows[j] = widens ? static_cast<const void *>(wide + j * stride) : row_at(m, row);
    }
    int64_t i = 0;
    for (; i + TILE_M <= group.members; i += TILE_M)
      tiles<TILE_M>(p, group.places + i, rows, n, count);
    for (; i < group.members; i++) tiles<1>(p, group.places + i, rows, n, count);
  }
  return true;
}

}  // namespace
