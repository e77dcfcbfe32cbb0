// Products in float32. Activations are copied, widened; weights are widened as they are multiplied,
// but packed ones before, a few rows at a time, which is the same.
#pragma once

#include "unpack.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int MOST_VECTORS = REGISTERS == 32 ? 6 : 4;  // that meet rows at a time
constexpr int64_t PREFETCH = 4096;       // bytes ahead of what is multiplied
constexpr int64_t AT_HAND = 256 << 10;   // bytes of rows that many vectors meet in turn
constexpr int MOST_ROWS = 16;            // a multiple of TILE_N

INLINE int64_t padded(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

// One odd cache line more: rows that are a power of two apart would fall into the same places.
INLINE int64_t float_row(int64_t columns) { return padded(columns) + LANES; }

INLINE int rows_at_hand(int64_t stride) {
  const int64_t rows = AT_HAND / (stride + 1) / TILE_N * TILE_N;
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
// b: rows `stride` bytes apart. What comes next is fetched ahead: of these, then of the N after. Of
// float32 the processor finds enough by itself once there are a few products for each number.
template <int TYPE, int M, int N>
INLINE void dots(const float *const *a, const char *b, int64_t stride, int64_t columns,
                 float (*out)[N]) {
  F32 sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = F32{};
  const int64_t whole = columns / LANES * LANES;
  int64_t k = 0, until = whole - PREFETCH / Numbers<TYPE>::SIZE, ahead = PREFETCH;
  for (;; until = whole, ahead += (N - 1) * stride) {
    for (; k < until; k += LANES) {
      F32 row[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) {
        row[j] = Numbers<TYPE>::at(b + j * stride, k);
        if (TYPE != TOAST_F32 || M < 3)
          __builtin_prefetch(b + j * stride + k * Numbers<TYPE>::SIZE + ahead);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        F32 x = load<F32>(a[i] + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sums[i][j] = multiply_add(x, row[j], sums[i][j]);
      }
    }
    if (until == whole) break;
  }
  if (k < columns)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      F32 row = Numbers<TYPE>::some(b + j * stride, k, int(columns - k));
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
        sums[i][j] = multiply_add(load<F32>(a[i] + k), row, sums[i][j]);
    }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) out[i][j] = sum(sums[i][j]);
}

// Rows of numbers from `first` up to `end`, `stride` bytes apart.
struct Rows {
  const char *data;
  int64_t stride, first, end;
};

// M members of a group with the next N rows.
template <int TYPE, int M, int N>
INLINE void tile(const toast::Product &p, const uint32_t *places, const Rows &rows) {
  const toast_matrix &m = *p.matrix;
  const float *vectors[M];
  float out[M][N];
  for (int i = 0; i < M; i++)
    vectors[i] = float_vector(p, p.vector ? p.vector[places[i]] : places[i]);
  dots<TYPE, M, N>(vectors, rows.data, rows.stride, m.columns, out);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      put(p.out_type, p.out, places[i] * m.rows + rows.first + j, out[i][j]);
}

// M members with rows, as many at a time as leave registers for all sums, and for a vector.
template <int TYPE, int M>
static void tiles(const toast::Product &p, const uint32_t *places, Rows rows) {
  constexpr int MOST = (REGISTERS - 1) / (M + 1), N = MOST < TILE_N ? MOST : TILE_N;
  for (; rows.first + N <= rows.end; rows.first += N, rows.data += N * rows.stride)
    tile<TYPE, M, N>(p, places, rows);
  for (; rows.first < rows.end; rows.first++, rows.data += rows.stride)
    for (int i = 0; i < M; i++) tile<TYPE, 1, 1>(p, places + i, rows);
}

// `members` of them, M at most.
template <int TYPE, int M>
INLINE void tiles_of(int64_t members, const toast::Product &p, const uint32_t *places,
                     const Rows &rows) {
  if constexpr (M > 1)
    if (members < M) return tiles_of<TYPE, M - 1>(members, p, places, rows);
  tiles<TYPE, M>(p, places, rows);
}

// All members, in as few goes as can be, of which none is much smaller than another.
template <int TYPE>
static void multiply_rows(const toast::Product &p, const toast::Group &group, const Rows &rows) {
  int64_t goes = (group.members + MOST_VECTORS - 1) / MOST_VECTORS, done = 0;
  for (; goes; goes--) {
    const int64_t members = (group.members - done + goes - 1) / goes;
    tiles_of<TYPE, MOST_VECTORS>(members, p, group.places + done, rows);
    done += members;
  }
}

static bool multiply_floats(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end) {
  const toast_matrix &m = *p.matrix;
  const int64_t wide_row = float_row(m.columns), stride = m.bits ? wide_row * 4 : row_bytes(m);
  const int most = group.members == 1 ? TILE_N : rows_at_hand(stride);
  float *wide = nullptr;
  uint8_t *bytes = nullptr;
  if (m.bits) {
    wide = static_cast<float *>(toast::scratch(toast::ROWS, most * stride));
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, m.columns));
    if (!wide || !bytes) return false;
  }
  for (int64_t n = first; n < end; n += most) {
    const int64_t row = group.expert * m.rows + n, count = end - n < most ? end - n : most;
    for (int64_t j = 0; m.bits && j < count; j++) widen_row(m, row + j, bytes, wide + j * wide_row);
    const void *data = m.bits ? static_cast<const void *>(wide) : row_at(m, row);
    const Rows rows = {static_cast<const char *>(data), stride, n, n + count};
    if (m.bits || m.type == TOAST_F32) {
      multiply_rows<TOAST_F32>(p, group, rows);
    } else if (m.type == TOAST_F16) {
      multiply_rows<TOAST_F16>(p, group, rows);
    } else {
      multiply_rows<TOAST_BF16>(p, group, rows);
    }
  }
  return true;
}

}  // namespace
