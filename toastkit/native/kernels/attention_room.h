// Row addresses, and a thread's workspace for a span.
#pragma once

#include "attention.h"
#include "attention_products.h"
#include "product.h"

namespace {

constexpr int TILE_QUERIES = 4 * LANES;         // queries of a tile, one per lane
constexpr int64_t SCORES_STRIDE = toast::SPAN;  // floats per query, if few

// Calls work.operator()<TYPE>() for the type of keys or values that are read as floats. int8 is not
// where it is multiplied as integers (attention_digits.h): that code took a minute to compile.
template <class Work>
INLINE void dispatch_type(int type, const Work &work) {
  if (type == TOAST_F32) return work.template operator()<TOAST_F32>();
  if (type == TOAST_F16) return work.template operator()<TOAST_F16>();
  if (type == TOAST_BF16) return work.template operator()<TOAST_BF16>();
#if !defined(__AVX2__)
  work.template operator()<TOAST_I8>();
#endif
}

INLINE const char *row_of(const toast_rows &rows, int64_t batch, int64_t head, int64_t position) {
  const int64_t at = batch * rows.strides[0] + head * rows.strides[1] + position * rows.strides[2];
  return static_cast<const char *>(rows.data) + at * toast_type_bytes(rows.type);
}

// So few queries that keys are transposed for them; transposing costs more with narrow registers.
INLINE bool are_few(int64_t rows) { return rows <= (LANES > 4 ? LANES : 2); }

// Computed rows: the next power of two.
INLINE int64_t padded_rows(int64_t rows) {
  int64_t n = 1;
  while (n < rows) n *= 2;
  return n;
}

// Calls work.operator()<N>() for N = padded_rows(rows).
template <class Work>
INLINE void dispatch_rows(int64_t rows, const Work &work) {
  const int64_t n = padded_rows(rows);
  if (n == 1) return work.template operator()<1>();
  if (n == 2) return work.template operator()<2>();
  if constexpr (LANES >= 8) {
    if (n == 4) return work.template operator()<4>();
    if (n == 8) return work.template operator()<8>();
  }
  if constexpr (LANES >= 16) work.template operator()<16>();
}

INLINE int64_t value_floats(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Workspace of a span. queries: rows if few, else columns. keys: DOT_ROWS, as float32. scores:
// (rows, SPAN) if few, else (SPAN, lanes).
struct Workspace {
  float *queries, *scores, *keys;
};

INLINE bool make_workspace(const toast::Attention &a, Workspace *space) {
  const int64_t row = value_floats(a.call->key_size) + LANES;
  const int64_t queries = row * TILE_QUERIES, scores = toast::SPAN * TILE_QUERIES;
  const int64_t floats = queries + scores + DOT_ROWS * row;
  auto memory = static_cast<float *>(toast::scratch(toast::SCORES, floats * sizeof(float)));
  if (!memory) return false;
  *space = {memory, memory + queries, memory + queries + scores};
  return true;
}

// Gives the next `numbers` elements of `memory` to `place`.
template <class Number>
INLINE void carve(char *&memory, Number *&place, int64_t numbers) {
  place = reinterpret_cast<Number *>(memory);
  memory += numbers * sizeof *place;
}

// Keys whose values stay in L1 while their parts are met in turn by one tile of queries, which
// would otherwise wait for L2.
constexpr int64_t BLOCK_VALUES = 128;

#if defined(__AVX512VNNI__)
constexpr int64_t REGISTER = 4 * LANES;          // bytes of one
constexpr int64_t SPAN_WORDS = toast::SPAN / 4;  // 4-byte words of a span's weights

// int8 workspace of a span; [2]: upper and lower digits. queries, if many: (TILE_QUERIES, stride)
// bytes, zero-padded. columns: the same transposed, (stride / 4, lanes) words. offsets: 128 * sum
// of a query's digits. weights: words of four keys. keys: plus 128, (TILE_M, stride) or, transposed
// for few queries, (LANES, stride). values: two registers per four keys, interleaved. weighted:
// int32 accumulators, for each half of a register of value bytes four registers per row.
struct Int8Workspace {
  int64_t stride;
  int8_t *queries[2];
  int32_t *columns[2], *offsets[2], *sums[2], *weights[2], *weighted;
  uint8_t *keys, *values;
  float *query_steps, *weight_steps, *scales;
};

INLINE int64_t padded_row(int64_t size) { return (size + REGISTER - 1) / REGISTER * REGISTER; }

INLINE bool make_int8_workspace(const toast::Attention &a, Int8Workspace *digits) {
  constexpr int KEYS = LANES > TILE_M ? LANES : TILE_M;
  const int64_t stride = padded_row(a.call->key_size);
  const int64_t each = TILE_QUERIES * (2 * stride + 4 * (1 + TILE_M + SPAN_WORDS));
  const int64_t values = toast::SPAN / 4 * 2 * REGISTER;
  const int64_t weighted = TILE_QUERIES * 2 * padded_row(a.call->value_size) * 4;
  const int64_t bytes =
      2 * each + KEYS * stride + values + weighted + 4 * (2 * TILE_QUERIES + toast::SPAN);
  auto memory = static_cast<char *>(toast::scratch(toast::BYTES, bytes));
  if (!memory) return false;
  digits->stride = stride;
  for (int part = 0; part < 2; part++)
    carve(memory, digits->columns[part], TILE_QUERIES * stride / 4);
  for (int part = 0; part < 2; part++) {
    carve(memory, digits->queries[part], TILE_QUERIES * stride);
    carve(memory, digits->offsets[part], TILE_QUERIES);
    carve(memory, digits->sums[part], TILE_QUERIES * TILE_M);
    carve(memory, digits->weights[part], TILE_QUERIES * SPAN_WORDS);
  }
  carve(memory, digits->keys, KEYS * stride);
  carve(memory, digits->values, values);
  carve(memory, digits->weighted, weighted / 4);
  carve(memory, digits->query_steps, TILE_QUERIES);
  carve(memory, digits->weight_steps, TILE_QUERIES);
  carve(memory, digits->scales, toast::SPAN);
  return true;
}
#elif defined(__AVX2__)
constexpr int64_t WORDS = 2 * LANES;  // per register
constexpr int KEY_ROWS = 2;           // that many queries meet at a time

// int8 workspace of a span, in words of 16 bits. queries: (TILE_QUERIES, stride); if few, blocks of
// WORDS of up to four in turn. columns, if many: (stride / 2, lanes) pairs. keys: (KEY_ROWS,
// stride). weights: pairs of keys, (rows, SPAN / 2) if few, else (SPAN / 2, lanes). values: pairs
// of keys, (BLOCK_VALUES / 2, WORDS). weighted: int32 sums, (blocks of WORDS, rows, WORDS).
struct Int8Workspace {
  int64_t stride;
  int16_t *queries, *columns, *keys, *weights, *values;
  int32_t *weighted;
  float *query_steps, *weight_steps, *scales;
};

INLINE int64_t padded_words(int64_t size) { return (size + WORDS - 1) / WORDS * WORDS; }

INLINE bool make_int8_workspace(const toast::Attention &a, Int8Workspace *to) {
  const int64_t stride = to->stride = padded_words(a.call->key_size);
  const int64_t queries = TILE_QUERIES * stride, weights = TILE_QUERIES * toast::SPAN;
  const int64_t weighted = TILE_QUERIES * padded_words(a.call->value_size);
  const int64_t words = 2 * queries + KEY_ROWS * stride + weights + BLOCK_VALUES * WORDS;
  const int64_t bytes = 2 * words + 4 * (weighted + 2 * TILE_QUERIES + toast::SPAN);
  auto memory = static_cast<char *>(toast::scratch(toast::BYTES, bytes));
  if (!memory) return false;
  carve(memory, to->queries, queries), carve(memory, to->columns, queries);
  carve(memory, to->keys, KEY_ROWS * stride), carve(memory, to->weights, weights);
  carve(memory, to->values, BLOCK_VALUES * WORDS), carve(memory, to->weighted, weighted);
  carve(memory, to->query_steps, TILE_QUERIES), carve(memory, to->weight_steps, TILE_QUERIES);
  carve(memory, to->scales, toast::SPAN);
  return true;
}
#endif

INLINE const char *query_of(const toast::Attention &a, const toast::Tile &tile, int64_t r) {
  const int64_t row = tile.first + r, head = tile.head * a.repeats + row % a.repeats;
  return row_of(a.call->queries, tile.batch, head, row / a.repeats);
}

// Prefetch of a tile's keys or values [first, end) in `times` steps. If heads are adjacent it is a
// share of the memory of all; neighbouring tiles take the rest.
INLINE PacedPrefetch prefetch_of(const toast::Attention &a, const toast_rows &rows,
                                 const toast::Tile &tile, int64_t first, int64_t end,
                                 int64_t times) {
  const int64_t bytes = (end - first) * rows.strides[2] * toast_type_bytes(rows.type);
  if (rows.strides[2] <= rows.strides[1])
    return PacedPrefetch::over(row_of(rows, tile.batch, tile.head, first), bytes, times);
  return PacedPrefetch::over(
      row_of(rows, tile.batch, 0, first) + bytes * tile.head / a.call->key_heads,
      bytes * tile.heads / a.call->key_heads, times);
}

// Of the keys that the thread probably reads next: the next span's, or the next heads'.
INLINE PacedPrefetch prefetch_next_keys(const toast::Attention &a, const toast::Tile &tile,
                                        int64_t first, int64_t times) {
  const toast_attention &call = *a.call;
  toast::Tile next = tile;
  if (first == call.key_positions) first = 0, next.head += tile.heads;
  const int64_t end = first + toast::SPAN < call.key_positions ? first + toast::SPAN
                                                               : call.key_positions;
  return prefetch_of(a, call.keys, next, first, next.head < call.key_heads ? end : first, times);
}

// Elements d and following of query r of a tile, times `scale`; zeros beyond the last.
INLINE F32 query_floats(const toast::Attention &a, const toast::Tile &tile, int64_t r, int64_t d) {
  const toast_attention &call = *a.call;
  if (r >= tile.rows || d >= call.key_size) return F32{};
  return some_floats_at(call.queries.type, query_of(a, tile, r), d, int(call.key_size - d)) *
         call.scale;
}

}  // namespace
