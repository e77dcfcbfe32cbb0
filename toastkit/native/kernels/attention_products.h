// Q K^T and P V in float32. Every output is a single chain of multiply-adds, over the key's
// elements or over the keys in order; chains are side by side in lanes.
#pragma once

#include "prefetch.h"

namespace {

constexpr int64_t BLOCK_KEYS = 32;  // keys whose values all queries meet while cached
constexpr int64_t KEYS_AHEAD = 64;  // prefetch distance in keys, with one head

// Rows of a tile of scores, of two vectors and of four, and of weighted values, if few and if many
// (by half as many registers where these are more rows). With sixteen registers twelve sums, as a
// load is needed for each of eight, and there are two in a clock.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int DOT_ROWS = 6, WIDE_DOT_ROWS = 3, FEW_ROWS = 2, MANY_ROWS = 6;
#else
constexpr int DOT_ROWS = TILE_M, WIDE_DOT_ROWS = TILE_M, FEW_ROWS = TILE_M, MANY_ROWS = TILE_M;
#endif

// Positions, with several adjacent heads.
INLINE int64_t keys_ahead(int64_t heads) {
  return KEYS_AHEAD / heads > LANES ? KEYS_AHEAD / heads : LANES;
}

// Prefetches rows in memory order, as hardware prefetchers expect. With a stride (a position-major
// cache) it fetches row by row, where the hardware prefetcher would restart with each row.
struct RowPrefetch {
  const char *from;
  int64_t bytes;       // per fetch
  int64_t row, apart;  // bytes per row, and stride
  int64_t at = 0;      // in the row at `from`

  // Starts at `byte` of the rows' concatenated bytes.
  static RowPrefetch of(const char *rows, int64_t byte, int64_t bytes, int64_t row, int64_t apart) {
    if (row == apart) return {rows + byte, bytes, row, apart};
    return {rows + byte / row * apart, bytes, row, apart, byte % row};
  }

  void fetch() {
    if (row == apart) {
      for (int64_t at = 0; at < bytes; at += LINE) prefetch(from + at);
      from += bytes;
      return;
    }
    for (int64_t left = bytes; left > 0; left -= LINE) {
      prefetch(from + at);
      at += left < LINE ? left : LINE;
      if (at >= row) at -= row, from += apart;
    }
  }
};

// Calls work(d, column) for each element d of LANES rows, in order. 32 bits are transposed as one
// element, then widened.
template <int TYPE, class Work>
INLINE void transpose_rows(const char *const *rows, int64_t size, RowPrefetch ahead,
                           const Work &work) {
  constexpr int PARTS = 4 / Dtype<TYPE>::SIZE, AT_A_TIME = PARTS * LANES;  // elements per row
  F32 r[LANES], scales = {};
  if constexpr (TYPE == TOAST_I8)
    for (int i = 0; i < LANES; i++) scales[i] = scale_of(rows[i], size);
  auto give = [&](int64_t at, F32 column) __attribute__((always_inline)) {
    work(at, TYPE == TOAST_I8 ? column * scales : column);
  };
  int64_t d = 0;
  for (; d + AT_A_TIME <= size; d += AT_A_TIME) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) r[i] = load<F32>(rows[i] + d * Dtype<TYPE>::SIZE);
    ahead.fetch();
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      const int64_t at = d + PARTS * i;
      give(at, Dtype<TYPE>::template part<0>(r[i]));
      if constexpr (PARTS > 1) give(at + 1, Dtype<TYPE>::template part<1>(r[i]));
      if constexpr (PARTS > 2) give(at + 2, Dtype<TYPE>::template part<2>(r[i]));
      if constexpr (PARTS > 2) give(at + 3, Dtype<TYPE>::template part<3>(r[i]));
    }
  }
  for (; d < size; d += LANES) {
    const int numbers = size - d < LANES ? int(size - d) : LANES;
    for (int i = 0; i < LANES; i++)
      r[i] = numbers < LANES ? Dtype<TYPE>::some(rows[i], d, numbers)
                             : Dtype<TYPE>::at(rows[i], d);
    transpose(r);
    for (int i = 0; i < numbers; i++) give(d + i, r[i]);
  }
}

// Whether N queries are stored transposed: a register's worth is, and with other layouts GCC spends
// half a minute on addressing.
template <int N>
constexpr bool TRANSPOSED = N == LANES;

// out[n][lane] = queries[n] . keys[lane]. keys: LANES rows. queries, out: `stride` apart unless
// TRANSPOSED.
template <int TYPE, int N>
static void dot_keys(const char *const *keys, RowPrefetch ahead, const float *queries,
                     int64_t stride, int64_t size, float *out, int64_t out_stride) {
  F32 sums[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; n++) sums[n] = F32{};
  transpose_rows<TYPE>(keys, size, ahead,
                       [&](int64_t d, F32 column) __attribute__((always_inline)) {
    const float *at = queries + (TRANSPOSED<N> ? d * N : d);
    if (TRANSPOSED<N>) asm("" : "+r"(at));
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
      sums[n] = multiply_add(splat(at[TRANSPOSED<N> ? n : n * stride]), column, sums[n]);
  });
#pragma GCC unroll 16
  for (int n = 0; n < N; n++) store(out + n * out_stride, sums[n]);
}

// out[n][lane] = columns[:, lane] . rows[n]. columns: (size, V * LANES). rows: `stride` apart.
template <int V, int N>
static void dot_columns(const float *columns, const float *rows, int64_t stride, int64_t size,
                        float *out) {
  F32 sums[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[n][v] = F32{};
  for (int64_t d = 0; d < size; d++) {
    if constexpr (N < V) {  // the fewer ones stay in registers, the others come as they are met
      F32 numbers[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) numbers[n] = splat(rows[n * stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const F32 column = load<F32>(columns + (d * V + v) * LANES);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[n][v] = multiply_add(numbers[n], column, sums[n][v]);
      }
      continue;
    }
    F32 column[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) column[v] = load<F32>(columns + (d * V + v) * LANES);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      F32 number = splat(rows[n * stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[n][v] = multiply_add(number, column[v], sums[n][v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + (n * V + v) * LANES, sums[n][v]);
}

// Calls work.operator()<N>(first) over `count` rows, MOST at a time, then 4, 2, 1.
template <int MOST = TILE_M, class Work>
INLINE void by_row_tiles(int64_t count, const Work &work) {
  int64_t n = 0;
  for (; n + MOST <= count; n += MOST) work.template operator()<MOST>(n);
  if (MOST > 4 && n + 4 <= count) work.template operator()<4>(n), n += 4;
  if (MOST > 2 && n + 2 <= count) work.template operator()<2>(n), n += 2;
  if (n < count) work.template operator()<1>(n);
}

// Of up to DOT_ROWS rows.
INLINE void dot_all(int vectors, const float *columns, const float *rows, int64_t stride,
                    int64_t count, int64_t size, float *out) {
  auto dot = [&]<int V, int N>(int64_t n) {
    dot_columns<V, N>(columns, rows + n * stride, stride, size, out + n * V * LANES);
  };
  if (vectors > 2)
    return by_row_tiles<WIDE_DOT_ROWS>(
        count, [&]<int N>(int64_t n) { dot.template operator()<4, N>(n); });
  by_row_tiles<DOT_ROWS>(count, [&]<int N>(int64_t n) {
    vectors == 1 ? dot.template operator()<1, N>(n) : dot.template operator()<2, N>(n);
  });
}

// out[m][d] += sum over keys of weights[key][m] * values[key][d], for M rows and V registers,
// partial if V is 1. left: elements of a row from d on. MANY: the weights of a key are adjacent.
template <int TYPE, int M, int V, bool MANY>
static void weigh_tile(const float *weights, int64_t weight_stride, int64_t key_stride,
                       const char *values, int64_t stride, int64_t left, RowPrefetch ahead,
                       int64_t keys, float *out, int64_t out_stride) {
  const int numbers = int(left < LANES ? left : LANES);
  F32 sums[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[m][v] = load<F32>(out + m * out_stride + v * LANES);
  for (int64_t j = 0; j < keys; j++) {
    const char *row = values + j * stride;
    F32 value[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const bool part = V == 1 && numbers < LANES;
      value[v] = part ? Dtype<TYPE>::some(row, 0, numbers) : Dtype<TYPE>::at(row, v * LANES);
      if constexpr (TYPE == TOAST_I8) value[v] *= scale_of(row, left);
    }
    ahead.fetch();
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      F32 weight = splat(weights[j * key_stride + (MANY ? m : m * weight_stride)]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[m][v] = multiply_add(weight, value[v], sums[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + m * out_stride + v * LANES, sums[m][v]);
}

// weigh_tile for all rows and elements of adjacent heads, in blocks of keys. head_weights: weights
// from one head to the next.
template <int TYPE, bool MANY>
static void weigh_all(const float *weights, int64_t weight_stride, int64_t key_stride,
                      int64_t head_weights, const char *values, int64_t stride, int64_t keys,
                      int64_t heads, int64_t rows, int64_t size, float *out, int64_t out_stride) {
  constexpr int64_t SIZE = Dtype<TYPE>::SIZE;
  const int64_t row = row_bytes<TYPE>(size);
  for (int64_t n = 0; n < (keys + BLOCK_KEYS - 1) / BLOCK_KEYS * heads; n++) {
    const int64_t j = n / heads * BLOCK_KEYS, h = n % heads;
    const int64_t some = keys - j < BLOCK_KEYS ? keys - j : BLOCK_KEYS;
    by_row_tiles<MANY ? MANY_ROWS : FEW_ROWS>(rows, [&]<int M>(int64_t m) {
      constexpr int V = M > FEW_ROWS ? TILE_N / 2 : TILE_N, WIDTH = V * LANES;
      const float *from = weights + h * head_weights + j * key_stride + m * weight_stride;
      const char *next = values + (j + some) * stride, *block = values + j * stride + h * row;
      float *to = out + (h * rows + m) * out_stride;
      // This tile's share of the next block; of MANY rows the first tile takes all of it.
      const int64_t met = MANY ? 0 : m, share = MANY ? (m ? 0 : rows) : M;
      auto ahead = [&](int64_t d, int64_t width) {
        return RowPrefetch::of(next, h * row * some + (size * met + d * share) * SIZE * some / rows,
                               width * SIZE * share / rows, heads * row, stride);
      };
      int64_t d = 0;
      for (; d + WIDTH <= size; d += WIDTH)
        weigh_tile<TYPE, M, V, MANY>(from, weight_stride, key_stride, block + d * SIZE, stride,
                                     size - d, ahead(d, WIDTH), some, to + d, out_stride);
      for (; d < size; d += LANES)
        weigh_tile<TYPE, M, 1, MANY>(from, weight_stride, key_stride, block + d * SIZE, stride,
                                     size - d, ahead(d, LANES), some, to + d, out_stride);
    });
  }
}

}  // namespace
