// Attention over int8 keys and values on AMX: the integers of attention_digits.h, so the same bits.
//
// Keys are used as stored: 16 of them times the digits of up to 16 queries. Values have to be
// interleaved by four keys, once for the weights of all queries.
#pragma once

#include <algorithm>

#include "amx.h"
#include "attention_digits.h"
#include "attention_weights.h"

namespace {

constexpr int64_t TILE = SIDE * 64;  // bytes

// Up to 16 rows of a head meet keys at a time: a group. Its upper and lower digits share a tile if
// they fit, else take two.
INLINE int64_t groups_of(int64_t rows) { return (rows + SIDE - 1) / SIDE; }
INLINE int64_t group_tiles(int64_t rows) { return 2 * rows > SIDE ? 2 : 1; }

// A tile's prepared queries, digits as columns: per head and group, and per part of a key, (words
// of four elements, 16 columns), upper digits before lower ones. If a head's rows fit, both are in
// one tile, 8 columns apart. steps: (heads * rows).
struct Columns {
  int64_t parts, words;   // parts per key, words per part
  int64_t tiles, groups;  // tiles per group, groups per head
  char *digits;
  float *steps;

  static Columns at(const char *memory, int64_t heads, int64_t rows, int64_t size) {
    const int64_t parts = (size + REGISTER - 1) / REGISTER;
    Columns to = {parts, (size + 4 * parts - 1) / (4 * parts), group_tiles(rows),
                  groups_of(rows), const_cast<char *>(memory), nullptr};
    to.steps = reinterpret_cast<float *>(to.digits + heads * to.head_bytes());
    return to;
  }
  int64_t head_bytes() const { return groups * tiles * parts * TILE; }
  const char *of(int64_t head, int64_t group) const {
    return digits + head * head_bytes() + group * tiles * parts * TILE;
  }
};

static int64_t columns_bytes(int64_t heads, int64_t rows, int64_t size) {
  return heads * Columns::at(nullptr, 0, rows, size).head_bytes() + padded_row(4 * heads * rows);
}

static void prepare_columns(const toast::Attention &a, const toast::Tile &tile, char *memory) {
  const int64_t size = a.call->key_size, rows = tile.rows;
  const Columns to = Columns::at(memory, tile.heads, rows, size);
  for (int64_t i = 0; i < tile.heads * rows; i++) {
    const int64_t h = i / rows, r = i % rows;
    // Where a word of four elements goes: counted, as dividing for each takes longer than the rest.
    int64_t offsets[4], word = 0, part_at = 0;
    const QuantisedQuery query = quantise_query(a, tile.of_head(h), r, padded_row(size),
                                                [&](int64_t, int digit, I8 sixteen) {
      const int64_t column = to.tiles > 1 ? r % SIDE : digit * 8 + r;
      const int64_t tiles = (to.tiles - 1) * digit * to.parts;
      char *at = const_cast<char *>(to.of(h, r / SIDE)) + tiles * TILE + column * 4;
      for (int i = 0; i < 4 && !digit; i++) {
        offsets[i] = part_at + word * 64;
        if (++word == to.words) word = 0, part_at += TILE;
      }
      int32_t four[4];
      store(four, sixteen);
      for (int i = 0; i < 4 && offsets[i] < to.parts * TILE; i++)
        memcpy(at + offsets[i], four + i, 4);
    });
    to.steps[i] = query.step;
  }
}

// Workspace of a span. scores: (heads * rows, SPAN). step_sums: double-buffered. keys: 16, at the
// cache's end. weights: digits, upper of all rows then lower, (2 * rows, SPAN). values: 64 elements
// of a block, four tiles per 64 keys. weighted: per 64 elements, (2 * rows, 64).
struct TileWorkspace {
  float *scores, *scales;
  int32_t (*step_sums)[2][SIDE][SIDE], (*weighted)[64];
  uint8_t *keys, *weights, *values;
  int64_t rows;  // of digits, in whole tiles
};

INLINE bool make_tile_workspace(const toast::Attention &a, const toast::Tile &tile,
                                TileWorkspace *space) {
  constexpr int64_t S = toast::SPAN;
  const int64_t keys = SIDE * padded_row(a.call->key_size), scores = tile.heads * tile.rows * S * 4;
  space->rows = (2 * tile.rows + SIDE - 1) / SIDE * SIDE;
  const int64_t weighted = space->rows * padded_row(a.call->value_size) * 4;
  const int64_t bytes =
      scores + 4 * S + 4 * TILE + weighted + keys + space->rows * S + BLOCK_VALUES * 64;
  auto memory = static_cast<char *>(toast::scratch(toast::BYTES, bytes));
  if (!memory) return false;
  carve(memory, space->scores, scores / 4);
  carve(memory, space->scales, S);
  carve(memory, space->step_sums, 2);
  carve(memory, space->weighted, weighted / 256);
  carve(memory, space->keys, keys);
  carve(memory, space->weights, space->rows * S);
  carve(memory, space->values, BLOCK_VALUES * 64);
  return true;
}

// Rough durations in units of 10 ns, to pace prefetches. SOFTMAX and WEIGHTS: LANES of a row.
// INTERLEAVE: four keys. MULTIPLY: a block.
enum { STEP_TIME = 16, SOFTMAX_TIME = 1, WEIGHTS_TIME = 1, INTERLEAVE_TIME = 1,
       MULTIPLY_TIME = 20 };

// Tile registers for Q K^T: two double-buffered pairs of sums (upper and lower digits); two tiles
// of keys and of queries, so that one loads while the other is read.
enum { KEY_SUMS = 0, KEYS = 4, QUERIES = 6 };

static void shape_for_keys(int64_t words) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, SIDE, 64);
  for (int slot = 0; slot < 2; slot++)
    shapes.set(KEYS + slot, SIDE, 4 * words), shapes.set(QUERIES + slot, words, 64);
  shape_tiles(shapes);
}

// A step: 16 keys of a head (`count` left) times a group of its queries.
struct KeyStep {
  const char *rows;
  int64_t count, head, first, group;

  // To the next group; else the next head, `row` bytes on; else the next keys.
  void advance(int64_t groups, int64_t heads, int64_t row, int64_t stride) {
    if (++group < groups) return;
    group = 0, rows += row;
    if (++head < heads) return;
    head = 0, rows += SIDE * stride - heads * row;
    first += SIDE, count -= SIDE;
  }
};

INLINE int64_t steps_of(const toast::Tile &tile, int64_t keys) {
  return (keys + SIDE - 1) / SIDE * tile.heads * groups_of(tile.rows);
}

// Multiplies a step's keys by its queries.
template <int SUMS, int TILES>
INLINE void multiply_keys(const char *keys, int64_t stride, const Columns &queries,
                          const char *columns) {
  const int64_t lower = queries.parts * TILE;
  clear_tile<SUMS>();
  if (TILES > 1) clear_tile<SUMS + 1>();
  auto multiply = [&]<int SLOT>(int64_t part) __attribute__((always_inline)) {
    constexpr int QUERY = TILES > 1 ? QUERIES : QUERIES + SLOT;
    load_tile<KEYS + SLOT>(keys + part * queries.words * 4, stride);
    load_tile<QUERY>(columns + part * TILE, 64);
    multiply_tiles<BOTH_SIGNED, SUMS, KEYS + SLOT, QUERY>();
    if (TILES == 1) return;
    load_tile<QUERIES + 1>(columns + lower + part * TILE, 64);
    multiply_tiles<BOTH_SIGNED, SUMS + 1, KEYS + SLOT, QUERIES + 1>();
  };
  for (int64_t part = 0; part < queries.parts; part += 2) {
    multiply.template operator()<0>(part);
    if (part + 1 < queries.parts) multiply.template operator()<1>(part + 1);
  }
}

// Scores from a step's sums, (keys, columns).
template <int TILES>
INLINE void store_scores(const int32_t (*sums)[SIDE][SIDE], const KeyStep &step, int64_t stride,
                         const Columns &queries, const toast::Tile &tile, int64_t size,
                         float *scores) {
  F32 scales;
  for (int i = 0; i < LANES; i++)
    scales[i] = scale_of(step.rows + (i < step.count ? i : step.count - 1) * stride, size);
  const float *steps = queries.steps + step.head * tile.rows + step.group * SIDE;
  float *to = scores + (step.head * tile.rows + step.group * SIDE) * SCORES_STRIDE + step.first;
  const int64_t count = tile.rows - step.group * SIDE;
  F32 query_scores[SIDE];
  if (TILES == 1) {  // keys k and k + 8 side by side
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
      const I32 a = load<I32>(sums[0][k]), b = load<I32>(sums[0][k + 8]);
      query_scores[k] = from_digits(quarters<0x44>(a, b), quarters<0xee>(a, b));
    }
    transpose_halves(query_scores);
  } else {
#pragma GCC unroll 16
    for (int k = 0; k < SIDE; k++)
      query_scores[k] = from_digits(load<I32>(sums[0][k]), load<I32>(sums[1][k]));
    transpose(query_scores);
  }
#pragma GCC unroll 16
  for (int n = 0; n < SIDE / (3 - TILES); n++)
    if (n < count) store(to + n * SCORES_STRIDE, query_scores[n] * (splat(steps[n]) * scales));
}

// The scores of a span, software-pipelined: multiply step s, store s - 1, scale s - 2.
template <int TILES>
static void scores_in_tiles(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                            int64_t end, const TileWorkspace &space, PacedPrefetch *prefetch) {
  const toast_attention &call = *a.call;
  const int64_t size = call.key_size, stride = call.keys.strides[2];
  const int64_t row = row_bytes<TOAST_I8>(size), steps = steps_of(tile, end - begin);
  const Columns queries = Columns::at(tile.queries, tile.heads, tile.rows, size);
  const bool overlaps = queries.parts * queries.words * 4 > row;  // parts together exceed the row
  KeyStep now = {row_of(call.keys, tile.batch, tile.head, begin), end - begin, 0, 0, 0}, past[2];
  auto step = [&]<int SLOT>(int64_t s) __attribute__((always_inline)) {
    constexpr int SUMS = KEY_SUMS + 2 * SLOT, OTHERS = KEY_SUMS + 2 - 2 * SLOT;
    const KeyStep before = past[SLOT];
    if (s < steps) {
      const char *rows = now.rows;
      int64_t apart = stride;
      if (now.count < SIDE + overlaps) {  // a tile would read past the last key
        apart = padded_row(size);
        for (int64_t i = 0; i < now.count && i < SIDE && !now.group; i++)
          memcpy(space.keys + i * apart, rows + i * stride, size);
        rows = reinterpret_cast<const char *>(space.keys);
      }
      prefetch->fetch(STEP_TIME / 2);
      multiply_keys<SUMS, TILES>(rows, apart, queries, queries.of(now.head, now.group));
      past[SLOT] = now;
      now.advance(queries.groups, tile.heads, row, stride);
    }
    prefetch->fetch(STEP_TIME / 2);
    if (s > 0 && s <= steps) {
      store_tile<OTHERS>(space.step_sums[1 - SLOT][0], 64);
      if (TILES > 1) store_tile<OTHERS + 1>(space.step_sums[1 - SLOT][1], 64);
    }
    if (s > 1 && s < steps + 2)
      store_scores<TILES>(space.step_sums[SLOT], before, stride, queries, tile, size, space.scores);
  };
  shape_for_keys(queries.words);
  for (int64_t s = 0; s < steps + 2; s += 2) {
    step.template operator()<0>(s);
    step.template operator()<1>(s + 1);
  }
}

// The softmax weights of a span. Its values are prefetched meanwhile.
static void weights_in_tiles(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                             int64_t end, const TileWorkspace &space, toast::Partial out) {
  const int64_t keys = end - begin, rows = tile.heads * tile.rows;
  const int64_t time = steps_of(tile, keys) * STEP_TIME + rows * (keys / LANES) * SOFTMAX_TIME;
  PacedPrefetch prefetch = prefetch_of(a, a.call->values, tile, begin, end, time);
  auto scores = group_tiles(tile.rows) > 1 ? scores_in_tiles<2> : scores_in_tiles<1>;
  scores(a, tile, begin, end, space, &prefetch);
  for (int64_t h = 0; h < tile.heads; h++)
    mask_scores(a, tile.of_head(h), begin, end, space.scores + h * tile.rows * SCORES_STRIDE,
                SCORES_STRIDE, 1);
  float *totals = out.sums + value_floats(a.call->value_size);
  for (int64_t i = 0; i < rows; i++)
    weights_of_row(space.scores + i * SCORES_STRIDE, keys, out.max + i, totals + i * a.row_floats,
                   [&] { prefetch.fetch(SOFTMAX_TIME); });
}

// Tile registers for P V: sums of 16 elements each, weights, values.
enum { VALUE_SUMS = 0, WEIGHTS = 4, VALUES = 5 };

static void shape_for_values(int64_t rows) {
  const int64_t side = 2 * rows < SIDE ? 2 * rows : SIDE;
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, tile < VALUES ? side : SIDE, 64);
  shape_tiles(shapes);
}

// Interleaves 64 elements of values (or those left) by four keys.
static void interleave_block(const char *values, int64_t stride, int64_t left, int64_t keys,
                             uint8_t *to, PacedPrefetch *prefetch) {
  PacedPrefetch paced = *prefetch;
  auto interleave = [&](int64_t j, const int64_t *at,
                        __mmask64 some) __attribute__((always_inline)) {
    I32 fours[4];
    interleave_values<false>(values + j * stride, at, some, fours);
    interleave_values<true>(values + j * stride, at, some, fours + 2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      store(to + j / 64 * 4 * TILE + i * TILE + j % 64 / 4 * 64, fours[i]);
  };
  const int64_t at[4] = {0, stride, 2 * stride, 3 * stride}, fours = keys / 4 * 4;
  if (left >= REGISTER) {
    for (int64_t j = 0; j < fours; j += 4)
      interleave(j, at, ~uint64_t(0)), paced.fetch(INTERLEAVE_TIME);
  } else {
    for (int64_t j = 0; j < fours; j += 4)
      interleave(j, at, byte_mask(left)), paced.fetch(INTERLEAVE_TIME);
  }
  if (const int64_t rest = keys % 4) {  // repeat the last, with weights of 0
    const int64_t offsets[4] = {0, std::min(rest - 1, int64_t(1)) * stride, (rest - 1) * stride,
                              (rest - 1) * stride};
    interleave(fours, offsets, byte_mask(left));
  }
  *prefetch = paced;
}

// 16 rows of weight digits, (rows, SPAN), times 64 elements of values; sets or adds to `out`.
static void multiply_values(const uint8_t *weights, const uint8_t *values, int64_t keys, bool added,
                            int32_t (*out)[64]) {
  if (added) {
    load_tile<VALUE_SUMS>(out[0], 256);
    load_tile<VALUE_SUMS + 1>(out[0] + SIDE, 256);
    load_tile<VALUE_SUMS + 2>(out[0] + 2 * SIDE, 256);
    load_tile<VALUE_SUMS + 3>(out[0] + 3 * SIDE, 256);
  } else {
    clear_tile<VALUE_SUMS>(), clear_tile<VALUE_SUMS + 1>();
    clear_tile<VALUE_SUMS + 2>(), clear_tile<VALUE_SUMS + 3>();
  }
  for (int64_t j = 0; j < keys; j += 64, weights += 64, values += 4 * TILE) {
    load_tile<WEIGHTS>(weights, toast::SPAN);
    load_tile<VALUES>(values, 64);
    multiply_tiles<RIGHT_SIGNED, VALUE_SUMS, WEIGHTS, VALUES>();
    load_tile<VALUES + 1>(values + TILE, 64);
    multiply_tiles<RIGHT_SIGNED, VALUE_SUMS + 1, WEIGHTS, VALUES + 1>();
    load_tile<VALUES + 2>(values + 2 * TILE, 64);
    multiply_tiles<RIGHT_SIGNED, VALUE_SUMS + 2, WEIGHTS, VALUES + 2>();
    load_tile<VALUES>(values + 3 * TILE, 64);
    multiply_tiles<RIGHT_SIGNED, VALUE_SUMS + 3, WEIGHTS, VALUES>();
  }
  store_tile<VALUE_SUMS>(out[0], 256);
  store_tile<VALUE_SUMS + 1>(out[0] + SIDE, 256);
  store_tile<VALUE_SUMS + 2>(out[0] + 2 * SIDE, 256);
  store_tile<VALUE_SUMS + 3>(out[0] + 3 * SIDE, 256);
}

// Weighted values of a span, for all heads of a tile; the next span's keys are prefetched
// meanwhile.
static void values_in_tiles(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                            int64_t keys, const TileWorkspace &space, float *out) {
  const toast_rows &values = a.call->values;
  const int64_t size = a.call->value_size, stride = values.strides[2], rows = tile.rows;
  const int64_t blocks = (keys + BLOCK_VALUES - 1) / BLOCK_VALUES;
  const int64_t part = keys / 4 * INTERLEAVE_TIME + blocks * space.rows / SIDE * MULTIPLY_TIME;
  const int64_t time = rows * (keys / LANES) * WEIGHTS_TIME + padded_row(size) / REGISTER * part;
  PacedPrefetch prefetch = prefetch_next_keys(a, tile, begin + keys, tile.heads * time);
  shape_for_values(rows);
  for (int64_t h = 0; h < tile.heads; h++, out += rows * a.row_floats) {
    const char *from = row_of(values, tile.batch, tile.head + h, begin);
    load_scales(from, stride, size, keys, space.scales);
    float steps[TILE_QUERIES];
    for (int64_t r = 0; r < rows; r++) {
      uint8_t *upper = space.weights + r * toast::SPAN, *lower = upper + rows * toast::SPAN;
      for (int64_t j = (keys + LANES - 1) / LANES * LANES; j % 64; j += LANES)
        store(upper + j, U8{}), store(lower + j, U8{});
      steps[r] = quantise_weights(space.scores + (h * rows + r) * SCORES_STRIDE, space.scales,
                                  keys, upper, lower, [&] { prefetch.fetch(WEIGHTS_TIME); });
    }
    for (int64_t j = 0; j < keys; j += BLOCK_VALUES) {
      const int64_t some = keys - j < BLOCK_VALUES ? keys - j : BLOCK_VALUES;
      for (int64_t d = 0; d < size; d += REGISTER) {
        interleave_block(from + j * stride + d, stride, size - d, some, space.values, &prefetch);
        for (int64_t r = 0; r < 2 * rows; r += SIDE) {
          multiply_values(space.weights + r * toast::SPAN + j, space.values, some, j > 0,
                          space.weighted + d / REGISTER * space.rows + r);
          prefetch.fetch(MULTIPLY_TIME);
        }
      }
    }
    for (int64_t d = 0; d < size; d += REGISTER) {
      const int32_t(*weighted)[64] = space.weighted + d / REGISTER * space.rows;
      for (int64_t r = 0; r < rows; r++)
        store_values(weighted[r], 2 * LANES, rows * 64, steps[r], size - d,
                     out + r * a.row_floats + d);
    }
  }
}

static bool attend_in_tiles(const toast::Attention &a, const toast::Tile &tile, int64_t begin,
                            int64_t end, toast::Partial out) {
  TileWorkspace space;
  if (!make_tile_workspace(a, tile, &space)) return false;
  memset(out.sums, 0, tile.heads * tile.rows * a.row_floats * sizeof(float));
  weights_in_tiles(a, tile, begin, end, space, out);
  values_in_tiles(a, tile, begin, end - begin, space, out.sums);
  release_tiles();
  return true;
}

}  // namespace
