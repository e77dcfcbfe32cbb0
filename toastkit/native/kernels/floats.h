// Products in float32. Activations are converted to float32 beforehand. Float weights are converted
// as they are multiplied; quantised ones are dequantised a few rows at a time, with the same
// results.
#pragma once

#include "prefetch.h"
#include "unpack.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int MAX_VECTORS = REGISTERS == 32 ? 6 : 4;  // vectors (M) per micro-kernel
constexpr int MAX_IN_REGISTERS = 4;  // vectors that meet packed rows as these are dequantised
constexpr int64_t BLOCK_BYTES = 256 << 10;  // of rows that all vectors of a batch meet while cached
constexpr int MAX_BLOCK_ROWS = 16;                    // a multiple of TILE_N

INLINE int64_t padded(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

// One cache line of padding: rows a power of two apart would map to the same cache sets.
INLINE int64_t float_stride(int64_t columns) { return padded(columns) + LANES; }

INLINE int rows_per_block(int64_t stride) {
  const int64_t rows = BLOCK_BYTES / (stride + 1) / TILE_N * TILE_N;
  return int(rows < TILE_N ? TILE_N : rows > MAX_BLOCK_ROWS ? MAX_BLOCK_ROWS : rows);
}

INLINE int64_t float_bytes(const toast::Product &p) {
  return float_stride(p.matrix->columns) * sizeof(float);
}

INLINE float *float_vector(const toast::Product &p, int64_t row) {
  return reinterpret_cast<float *>(p.prepared + row * p.prepared_stride);
}

INLINE void prepare_floats(const toast::Product &p, int64_t row) {
  const toast_vectors &x = *p.x;
  const int64_t columns = p.matrix->columns;
  float *out = float_vector(p, row);
  for (int64_t k = 0; k < columns; k += LANES)
    store(out + k, some_floats_at(x.type, x.data, row * x.stride + k, int(columns - k)));
}

template <int M, int N>
INLINE void horizontal_sums(const F32 (*sums)[N], float (*out)[N]) {
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) out[i][j] = horizontal_sum(sums[i][j]);
}

// out[i][j] = a[i] . b[j], M x N: one accumulator each, reduced at the end. b: rows `stride` bytes
// apart. Prefetches some bytes ahead in these rows, and at their end the next N rows. The hardware
// prefetcher suffices for float32 rows once M >= 3.
template <int TYPE, int M, int N>
INLINE void dot_products(const float *const *a, const char *b, int64_t stride, int64_t columns,
                         float (*out)[N]) {
  F32 sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = F32{};
  const int64_t whole = columns / LANES * LANES;
  int64_t ahead = toast::is_zen5 ? 1536 : 4096;  // the best of both kinds
  int64_t k = 0, until = whole - ahead / Dtype<TYPE>::SIZE;
  for (;; until = whole, ahead += (N - 1) * stride) {
    for (; k < until; k += LANES) {
      F32 row[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) {
        row[j] = Dtype<TYPE>::at(b + j * stride, k);
        if (TYPE != TOAST_F32 || M < 3)
          __builtin_prefetch(b + j * stride + k * Dtype<TYPE>::SIZE + ahead);
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
      F32 row = Dtype<TYPE>::some(b + j * stride, k, int(columns - k));
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
        sums[i][j] = multiply_add(load<F32>(a[i] + k), row, sums[i][j]);
    }
  horizontal_sums<M, N>(sums, out);
}

// Rows [first, end), `stride` bytes apart.
struct Rows {
  const char *data;
  int64_t stride, first, end;
};

// Puts M vectors times rows first .. first + N of an expert in their places. dots(vectors, out):
// out[i][j] = vectors[i] . row j.
template <int M, int N, class Dots>
INLINE void put_tile(const toast::Product &p, const uint32_t *outputs, int64_t first,
                     const Dots &dots) {
  const float *vectors[M];
  float out[M][N];
  for (int i = 0; i < M; i++)
    vectors[i] = float_vector(p, p.vector ? p.vector[outputs[i]] : outputs[i]);
  dots(vectors, out);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++)
      put(p.out_type, p.out, outputs[i] * p.matrix->rows + first + j, out[i][j]);
}

// M vectors times the next N rows.
template <int TYPE, int M, int N>
INLINE void micro_kernel(const toast::Product &p, const uint32_t *outputs, const Rows &rows) {
  put_tile<M, N>(p, outputs, rows.first, [&](const float *const *vectors, float (*out)[N]) {
    dot_products<TYPE, M, N>(vectors, rows.data, rows.stride, p.matrix->columns, out);
  });
}

// M vectors times all rows, N at a time: as many as leave registers for M * N accumulators, N rows
// and a vector.
template <int TYPE, int M>
static void row_tiles(const toast::Product &p, const uint32_t *outputs, Rows rows) {
  constexpr int N_MAX = (REGISTERS - 1) / (M + 1), N = N_MAX < TILE_N ? N_MAX : TILE_N;
  for (; rows.first + N <= rows.end; rows.first += N, rows.data += N * rows.stride)
    micro_kernel<TYPE, M, N>(p, outputs, rows);
  for (; rows.first < rows.end; rows.first++, rows.data += rows.stride)
    for (int i = 0; i < M; i++) micro_kernel<TYPE, 1, 1>(p, outputs + i, rows);
}

// Calls row_tiles for count <= M vectors.
template <int TYPE, int M>
INLINE void dispatch_tiles(int64_t count, const toast::Product &p, const uint32_t *outputs,
                           const Rows &rows) {
  if constexpr (M > 1)
    if (count < M) return dispatch_tiles<TYPE, M - 1>(count, p, outputs, rows);
  row_tiles<TYPE, M>(p, outputs, rows);
}

// All vectors of a batch, in as few passes as possible, of even size.
template <int TYPE>
static void multiply_block(const toast::Product &p, const toast::ExpertBatch &batch,
                           const Rows &rows) {
  int64_t passes = (batch.size + MAX_VECTORS - 1) / MAX_VECTORS, done = 0;
  for (; passes; passes--) {
    const int64_t count = (batch.size - done + passes - 1) / passes;
    dispatch_tiles<TYPE, MAX_VECTORS>(count, p, batch.outputs + done, rows);
    done += count;
  }
}

// M vectors times N packed rows, dequantised in registers: to the bit as dot_products of rows that
// dequantise_weights has stored. codes: (N, columns), a byte each. Prefetches the next N rows.
template <int M, int N>
INLINE void dot_packed(const toast_matrix &m, const float *const *a, int64_t row,
                       const uint8_t *codes, float (*out)[N]) {
  const int64_t groups = m.columns / m.group_size;
  auto next = reinterpret_cast<const char *>(row_at(m, row + N));
  auto ahead = PacedPrefetch::over(next, N * row_bytes(m), groups ? groups : 1);
  F32 sums[M][N] = {};
  for (int64_t g = 0; g < groups; g++) {
    ahead.fetch(1);
    F32 scales[N], biases[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) scale_and_bias(m, (row + j) * groups + g, scales[j], biases[j]);
    for (int64_t k = g * m.group_size; k < (g + 1) * m.group_size; k += LANES) {
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) {
        const F32 weights = multiply_add(from_u8(codes + j * m.columns + k), scales[j], biases[j]);
#pragma GCC unroll 4
        for (int i = 0; i < M; i++)
          sums[i][j] = multiply_add(load<F32>(a[i] + k), weights, sums[i][j]);
      }
    }
  }
  horizontal_sums<M, N>(sums, out);
}

// Unpacks N rows from row `first` of an expert, and multiplies a batch of M vectors by them.
template <int M, int N>
INLINE void multiply_unpacked(const toast::Product &p, const toast::ExpertBatch &batch,
                              int64_t first, uint8_t *codes) {
  const toast_matrix &m = *p.matrix;
  const int64_t row = batch.expert * m.rows + first;
  for (int j = 0; j < N; j++) unpack_bytes(m, row_at(m, row + j), codes + j * m.columns);
  put_tile<M, N>(p, batch.outputs, first, [&](const float *const *vectors, float (*out)[N]) {
    dot_packed<M, N>(m, vectors, row, codes, out);
  });
}

// M vectors at most times packed rows [first, end) of an expert. False if out of memory.
template <int M>
static bool multiply_packed(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  if constexpr (M > 1)
    if (batch.size < M) return multiply_packed<M - 1>(p, batch, first, end);
  constexpr int N = TILE_N;
  auto codes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, N * p.matrix->columns));
  if (!codes) return false;
  for (; first + N <= end; first += N) multiply_unpacked<M, N>(p, batch, first, codes);
  for (; first < end; first++) multiply_unpacked<M, 1>(p, batch, first, codes);
  return true;
}

static bool multiply_floats(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  const toast_matrix &m = *p.matrix;
  if (m.bits && batch.size <= MAX_IN_REGISTERS)
    return multiply_packed<MAX_IN_REGISTERS>(p, batch, first, end);
  const int64_t row_stride = float_stride(m.columns);
  const int64_t stride = m.bits ? row_stride * 4 : row_bytes(m);
  const int block_rows = batch.size == 1 ? TILE_N : rows_per_block(stride);
  float *dequantised = nullptr;
  uint8_t *bytes = nullptr;
  if (m.bits) {
    dequantised = static_cast<float *>(toast::scratch(toast::ROWS, block_rows * stride));
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, m.columns));
    if (!dequantised || !bytes) return false;
  }
  for (int64_t n = first; n < end; n += block_rows) {
    const int64_t row = batch.expert * m.rows + n;
    const int64_t count = end - n < block_rows ? end - n : block_rows;
    for (int64_t j = 0; m.bits && j < count; j++)
      dequantise_weights(m, row + j, bytes, dequantised + j * row_stride);
    const void *data = m.bits ? static_cast<const void *>(dequantised) : row_at(m, row);
    const Rows rows = {static_cast<const char *>(data), stride, n, n + count};
    if (m.bits || m.type == TOAST_F32) {
      multiply_block<TOAST_F32>(p, batch, rows);
    } else if (m.type == TOAST_F16) {
      multiply_block<TOAST_F16>(p, batch, rows);
    } else {
      multiply_block<TOAST_BF16>(p, batch, rows);
    }
  }
  return true;
}

}  // namespace
