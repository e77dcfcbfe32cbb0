// The products of attention: keys with queries, weights with values. Each number is one chain, from
// the first number of a key to the last, or from the first key to the last; lanes are side by side.
#pragma once

#include "lanes.h"

namespace {

constexpr int WIDE = 4 * LANES;        // columns side by side
constexpr int64_t AHEAD_BYTES = 4096;  // that are fetched before they are multiplied

// Rows become columns.
INLINE void transpose(F32 *r) {
#if defined(__AVX512F__)
  __m512 t[16];
  auto pd = [](__m512 v) { return _mm512_castps_pd(v); };
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
  }
  __m512 u[16];
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i + j]), pd(t[i + j + 2])));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i + j]), pd(t[i + j + 2])));
    }
  for (int c = 0; c < 4; c++) {
    __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    __m512 b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    r[c] = (F32)_mm512_shuffle_f32x4(a, b, 0x88);
    r[8 + c] = (F32)_mm512_shuffle_f32x4(a, b, 0xdd);
    a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    r[4 + c] = (F32)_mm512_shuffle_f32x4(a, b, 0x88);
    r[12 + c] = (F32)_mm512_shuffle_f32x4(a, b, 0xdd);
  }
#elif defined(__AVX2__)
  __m256 t[8], u[8];
  auto pd = [](__m256 v) { return _mm256_castps_pd(v); };
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(pd(t[i + j]), pd(t[i + j + 2])));
      u[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pd(t[i + j]), pd(t[i + j + 2])));
    }
  for (int c = 0; c < 4; c++) {
    r[c] = (F32)_mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = (F32)_mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < i; j++) {
      float one = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = one;
    }
#endif
}

// Columns of rows, (size, WIDE), times a number: row j is column j, zeros after the last one.
// rows: up to WIDE, a stride apart.
template <int TYPE>
static void turn(const char *rows, int64_t stride, int count, int64_t size, float scale,
                 float *out) {
  for (int j = 0; j < WIDE; j += LANES) {
    const int some = count - j < LANES ? count - j : LANES;
    if (some <= 0) {
      for (int64_t d = 0; d < size; d++) store(out + d * WIDE + j, F32{});
      continue;
    }
    for (int64_t d = 0; d < size; d += LANES) {
      const int numbers = size - d < LANES ? int(size - d) : LANES;
      F32 r[LANES];
      for (int i = 0; i < LANES; i++) {
        const char *row = rows + (j + i) * stride * Numbers<TYPE>::SIZE;
        r[i] = F32{};
        if (i >= some) continue;
        r[i] = numbers < LANES ? Numbers<TYPE>::some(row, d, numbers) : Numbers<TYPE>::at(row, d);
        __builtin_prefetch(row + d * Numbers<TYPE>::SIZE + AHEAD_BYTES);
      }
      transpose(r);
      for (int i = 0; i < numbers; i++) store(out + (d + i) * WIDE + j, r[i] * scale);
    }
  }
}

// out[n][lane] = columns[:, lane] . rows[n], a chain each. V: vectors of lanes. columns:
// (size, WIDE). rows, out: a stride apart.
template <int V, int N>
static void cross(const float *columns, const float *rows, int64_t stride, int64_t size,
                  float *out, int64_t out_stride) {
  F32 sums[N][V];
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) sums[n][v] = F32{};
  for (int64_t d = 0; d < size; d++) {
    F32 column[V];
    for (int v = 0; v < V; v++) column[v] = load<F32>(columns + d * WIDE + v * LANES);
    for (int n = 0; n < N; n++) {
      F32 number = all(rows[n * stride + d]);
      for (int v = 0; v < V; v++) sums[n][v] = multiply_add(number, column[v], sums[n][v]);
    }
  }
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) store(out + n * out_stride + v * LANES, sums[n][v]);
}

// Calls work<N>(first) for the largest N there is, from count rows on.
template <class Work>
INLINE void in_tiles(int64_t count, const Work &work) {
  int64_t n = 0;
  for (; n + TILE_M <= count; n += TILE_M) work.template operator()<TILE_M>(n);
  if (TILE_M > 4 && n + 4 <= count) work.template operator()<4>(n), n += 4;
  if (TILE_M > 2 && n + 2 <= count) work.template operator()<2>(n), n += 2;
  if (n < count) work.template operator()<1>(n);
}

INLINE void cross_all(int vectors, const float *columns, const float *rows, int64_t stride,
                      int64_t count, int64_t size, float *out, int64_t out_stride) {
  in_tiles(count, [&]<int N>(int64_t n) {
    const float *from = rows + n * stride;
    float *to = out + n * out_stride;
    if (vectors == 1) return cross<1, N>(columns, from, stride, size, to, out_stride);
    if (vectors == 2) return cross<2, N>(columns, from, stride, size, to, out_stride);
    cross<4, N>(columns, from, stride, size, to, out_stride);
  });
}

// out[m][d] = sum of weights[key][m] * values[key][d], a chain each, for M rows and V vectors of
// numbers; the last one only in part where V is 1 and `numbers` are fewer.
template <int TYPE, int M, int V>
static void weigh(const float *weights, int64_t weight_stride, int64_t key_stride,
                  const char *values, int64_t value_stride, int64_t keys, int numbers, float *out,
                  int64_t out_stride) {
  F32 sums[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sums[m][v] = F32{};
  for (int64_t j = 0; j < keys; j++) {
    const char *row = values + j * value_stride * Numbers<TYPE>::SIZE;
    F32 value[V];
    for (int v = 0; v < V; v++) {
      const bool part = V == 1 && numbers < LANES;
      value[v] = part ? Numbers<TYPE>::some(row, 0, numbers) : Numbers<TYPE>::at(row, v * LANES);
      if (M <= 4) __builtin_prefetch(row + v * LANES * Numbers<TYPE>::SIZE + AHEAD_BYTES);
    }
    for (int m = 0; m < M; m++) {
      F32 weight = all(weights[j * key_stride + m * weight_stride]);
      for (int v = 0; v < V; v++) sums[m][v] = multiply_add(weight, value[v], sums[m][v]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) store(out + m * out_stride + v * LANES, sums[m][v]);
}

template <int TYPE>
static void weigh_all(const float *weights, int64_t weight_stride, int64_t key_stride,
                      const char *values, int64_t value_stride, int64_t keys, int64_t rows,
                      int64_t size, float *out, int64_t out_stride) {
  in_tiles(rows, [&]<int M>(int64_t m) {
    const float *from = weights + m * weight_stride;
    float *to = out + m * out_stride;
    int64_t d = 0;
    for (; d + TILE_N * LANES <= size; d += TILE_N * LANES)
      weigh<TYPE, M, TILE_N>(from, weight_stride, key_stride, values + d * Numbers<TYPE>::SIZE,
                             value_stride, keys, LANES, to + d, out_stride);
    for (; d < size; d += LANES)
      weigh<TYPE, M, 1>(from, weight_stride, key_stride, values + d * Numbers<TYPE>::SIZE,
                        value_stride, keys, int(size - d < LANES ? size - d : LANES), to + d,
                        out_stride);
  });
}

}  // namespace
