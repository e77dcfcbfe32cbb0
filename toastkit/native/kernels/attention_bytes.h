// Queries times int8 keys, on int8 dot products: see attention_digits.h.
#pragma once

#include "attention_digits.h"

namespace {

#if defined(__AVX512VNNI__)
// VPDPBUSD: sum + bytes (u8) . signed_bytes (s8), four at a time.
INLINE I32 dpbusd(I32 sum, I32 bytes, I32 signed_bytes) {
  return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)signed_bytes);
}

INLINE I32 splat_word(const void *p) { return load<int32_t>(p) - I32{}; }  // broadcast to all lanes

INLINE I32 to_unsigned(I32 signed_bytes) { return signed_bytes ^ int32_t(0x80808080); }

// A tile's prepared queries if few, `count` with padding. digits: for each QUERY_TILE of them, and
// each word i of a quarter (see transpose_four_keys), upper then lower digits of each query: word i
// of each quarter, repeated four times.
struct FewQueries {
  int64_t count, stride;
  char *digits;
  float *steps;
  int32_t *offsets[2];

  INLINE int64_t bytes(int64_t count, int64_t size) {
    return count * 8 * padded_row(size) + padded_row(12 * count);
  }
  INLINE FewQueries at(const char *memory, int64_t count, int64_t size) {
    const int64_t stride = padded_row(size);
    char *digits = const_cast<char *>(memory), *steps = digits + count * 8 * stride;
    auto words = reinterpret_cast<int32_t *>(steps);
    return {count, stride, digits, reinterpret_cast<float *>(steps),
            {words + count, words + 2 * count}};
  }
};

constexpr int QUERY_TILE = 4;  // queries per pass over the keys

template <int N>
static void prepare_few(const toast::Attention &a, const toast::Tile &tile, char *memory) {
  constexpr int M = N < QUERY_TILE ? N : QUERY_TILE;
  const auto to = FewQueries::at(memory, tile.heads * N, a.call->key_size);
  for (int64_t r = 0; r < to.count; r++) {
    char *digits = to.digits + r / M * M * 8 * to.stride + r % M * 2 * REGISTER;
    const QuantisedQuery query = quantise_query(a, tile.of_head(r / N), r % N, to.stride,
                                                [&](int64_t d, int part, I8 sixteen) {
      const __m128i words = (__m128i)sixteen;
      char *at = digits + (d / REGISTER * 8 * M + part) * REGISTER + d % REGISTER;
      store(at, _mm_shuffle_epi32(words, 0x00)), at += 2 * M * REGISTER;
      store(at, _mm_shuffle_epi32(words, 0x55)), at += 2 * M * REGISTER;
      store(at, _mm_shuffle_epi32(words, 0xaa)), at += 2 * M * REGISTER;
      store(at, _mm_shuffle_epi32(words, 0xff));
    });
    to.steps[r] = query.step;
    for (int part = 0; part < 2; part++) to.offsets[part][r] = 128 * query.sums[part];
  }
}

static int64_t prepared_bytes(const toast::Attention &a, int64_t tile_rows, int64_t tile_heads) {
  if (!is_int8(a.call->keys) || !are_few(a.rows)) return 0;
  return FewQueries::bytes(tile_heads * padded_rows(tile_rows), a.call->key_size);
}

static void prepare(const toast::Attention &a, const toast::Tile &tile, char *to) {
  dispatch_rows(tile.rows, [&]<int N>() { prepare_few<N>(a, tile, to); });
}

// How transposed keys are obtained: from rows; from rows and kept for reuse; or from what was kept.
enum Source { LOAD, LOAD_AND_KEEP, REUSE };

// Transposes 4 x 4 words of four keys, plus 128: lane 4 * q + k of to[i] is word 4 * q + i of key
// k. left: bytes of a row from d on.
INLINE void transpose_four_keys(const char *const *rows, int64_t d, int64_t left, I32 *to) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    to[i] = to_unsigned(left < REGISTER
                         ? (I32)_mm512_maskz_loadu_epi8(byte_mask(left), rows[i] + d)
                         : load<I32>(rows[i] + d));
  transpose_quarters(to);
}

// out[n][key] = scores of queries first + n with LANES keys. cached: transposed keys, (stride / 4)
// registers. scales: of the keys.
template <int N, Source SOURCE>
static void dot_keys_int8(const FewQueries &queries, int64_t first, const char *const *rows,
                          int64_t size, uint8_t *cached, F32 scales, PacedPrefetch *prefetch,
                          float *out) {
  PacedPrefetch paced = *prefetch;
  I32 sums[N][2][4];  // by four keys
#pragma GCC unroll 1
  for (int half = 0; half < 2; half++) {
    I32 now[N][2][2];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) now[n][part][0] = now[n][part][1] = I32{};
    const char *digits = queries.digits + first * 8 * queries.stride;
    for (int64_t d = 0; d < size; d += REGISTER) {
      I32 keys[2][4];
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++)
        if (SOURCE != REUSE) transpose_four_keys(rows + 8 * half + 4 * g, d, size - d, keys[g]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        paced.fetch();
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++, cached += REGISTER) {
          if (SOURCE == REUSE) keys[g][i] = load<I32>(cached);
          if (SOURCE == LOAD_AND_KEEP) store(cached, keys[g][i]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 2
          for (int part = 0; part < 2; part++, digits += REGISTER) {
            I32 query = load<I32>(digits);
            asm("" : "+v"(query));  // GCC would load it twice
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++)
              now[n][part][g] = dpbusd(now[n][part][g], keys[g][i], query);
          }
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++)
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++) sums[n][part][2 * half + g] = now[n][part][g];
  }
  *prefetch = paced;
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    I32 both[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
      both[part] = sums_of_quarters(sums[n][part]) - queries.offsets[part][first + n];
    store(out + n * SCORES_STRIDE,
          from_digits(both[0], both[1]) * (splat(queries.steps[first + n]) * scales));
  }
}

// Few queries; N: padded_rows of a head. The span's values are prefetched meanwhile.
template <int N>
static void scores_of_few_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                               int64_t end, const Workspace &space, const Int8Workspace &digits) {
  constexpr int M = N < QUERY_TILE ? N : QUERY_TILE;
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, stride = call.keys.strides[2];
  const auto queries = FewQueries::at(tile.queries, tile.heads * N, size);
  const char *keys = row_of(call.keys, tile.batch, tile.head, begin);
  const int64_t row = row_bytes<TOAST_I8>(size), count = end - begin;
  const int64_t blocks = (count + LANES - 1) / LANES * tile.heads * (N / M);
  PacedPrefetch prefetch = prefetch_of(a, call.values, tile, begin, end,
                                       blocks * digits.stride / 8);
  for (int64_t j = 0; j < count; j += LANES)
    for (int64_t h = 0; h < tile.heads; h++) {
      const char *rows[LANES];  // missing ones repeat the last
      F32 scales;
      for (int i = 0; i < LANES; i++) {
        rows[i] = keys + (j + i < count ? j + i : count - 1) * stride + h * row;
        scales[i] = scale_of(rows[i], size);
      }
      auto dot = [&]<Source SOURCE>(int64_t n) {
        dot_keys_int8<M, SOURCE>(queries, n, rows, size, digits.keys, scales, &prefetch,
                                 space.scores + n * SCORES_STRIDE + j);
      };
      dot.template operator()<N == M ? LOAD : LOAD_AND_KEEP>(h * N);
      for (int n = M; n < N; n += M) dot.template operator()<REUSE>(h * N + n);
    }
}

// sums[n][lane] = columns[:, lane] . rows[n] in int32. columns: (count, V * LANES) words of digits.
// rows: keys plus 128, `stride` apart.
template <int V, int N>
static void dot_columns_int8(const int32_t *columns, const uint8_t *rows, int64_t stride,
                             int64_t count, int32_t *out) {
  I32 sums[N][V];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[n][v] = I32{};
  for (int64_t k = 0; k < count; k++) {
    I32 column[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) column[v] = load<I32>(columns + (k * V + v) * LANES);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const I32 bytes = splat_word(rows + n * stride + 4 * k);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[n][v] = dpbusd(sums[n][v], bytes, column[v]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + (n * V + v) * LANES, sums[n][v]);
}

static void scores_of_many_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                                int64_t end, int vectors, const Workspace &space,
                                const Int8Workspace &digits) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, lanes = vectors * LANES, stride = digits.stride;
  for (int64_t r = 0; r < lanes; r++) {
    const QuantisedQuery query = quantise_query(a, tile, r, stride,
                                                [&](int64_t d, int part, I8 sixteen) {
      store(digits.queries[part] + r * stride + d, sixteen);
    });
    digits.query_steps[r] = query.step;
    for (int part = 0; part < 2; part++) digits.offsets[part][r] = 128 * query.sums[part];
  }
  for (int part = 0; part < 2; part++)
    for (int v = 0; v < vectors; v++)
      for (int64_t d = 0; d < stride; d += REGISTER) {
        F32 r[LANES];
        for (int i = 0; i < LANES; i++)
          r[i] = load<F32>(digits.queries[part] + (v * LANES + i) * stride + d);
        transpose(r);
        for (int i = 0; i < LANES; i++)
          store(digits.columns[part] + (d / 4 + i) * lanes + v * LANES, r[i]);
      }
  for (int64_t j = begin; j < end; j += TILE_M) {
    const int64_t count = end - j < TILE_M ? end - j : TILE_M;
    const char *keys[TILE_M];
    for (int64_t n = 0; n < count; n++) {
      keys[n] = row_of(call.keys, tile.batch, tile.head, j + n);
      for (int64_t d = 0; d < stride; d += REGISTER)
        store(digits.keys + n * stride + d,
              to_unsigned((I32)_mm512_maskz_loadu_epi8(byte_mask(size - d), keys[n] + d)));
    }
    for (int part = 0; part < 2; part++)
      by_row_tiles(count, [&]<int N>(int64_t n) {
        const int32_t *columns = digits.columns[part];
        const uint8_t *from = digits.keys + n * stride;
        int32_t *to = digits.sums[part] + n * lanes;
        const int64_t words = (size + 3) / 4;
        if (vectors == 1) return dot_columns_int8<1, N>(columns, from, stride, words, to);
        if (vectors == 2) return dot_columns_int8<2, N>(columns, from, stride, words, to);
        dot_columns_int8<4, N>(columns, from, stride, words, to);
      });
    for (int64_t n = 0; n < count; n++)
      for (int64_t r = 0; r < lanes; r += LANES) {
        I32 sums[2];
        for (int part = 0; part < 2; part++)
          sums[part] = load<I32>(digits.sums[part] + n * lanes + r) -
                       load<I32>(digits.offsets[part] + r);
        const F32 steps = load<F32>(digits.query_steps + r) * splat(scale_of(keys[n], size));
        store(space.scores + (j - begin + n) * lanes + r, from_digits(sums[0], sums[1]) * steps);
      }
  }
}

// vectors: 0 if queries are few.
static void scores_int8(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                        int64_t end, int vectors, const Workspace &space,
                        const Int8Workspace &digits) {
  if (vectors) return scores_of_many_int8(a, tile, begin, end, vectors, space, digits);
  dispatch_rows(tile.rows,
                [&]<int N>() { scores_of_few_int8<N>(a, tile, begin, end, space, digits); });
}
#elif !defined(__AVX2__)
// Other processors read int8 as floats.
struct Int8Workspace {};
INLINE bool is_int8(const toast_rows &) { return false; }
INLINE bool make_int8_workspace(const toast::Attention &, Int8Workspace *) { return false; }
static int64_t prepared_bytes(const toast::Attention &, int64_t, int64_t) { return 0; }
static void prepare(const toast::Attention &, const toast::Tile &, char *) {}
template <class... Rest>
INLINE void scores_int8(const Rest &...) {}
#endif

}  // namespace
