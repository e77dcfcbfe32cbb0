// What an attention kernel is given, and its table of functions.
//
// Keys are divided into spans, counted from the first key that any query of the batch sees. Each
// query's span gives a partial softmax (max score, sum of exp(score - max), values weighted by
// these), and partials are merged in order (online softmax). So results do not depend, to the bit,
// on which thread takes a span, how many queries share a tile, or what else is masked, if finite.
#pragma once

#include "kernels.h"

namespace toast {

constexpr int64_t SPAN = 512;       // keys
constexpr int64_t SUM_CHAINS = 16;  // accumulators of a span's sum of weights, keys in turn

// The keys first to last that a query sees; HOLES: not all of them. EMPTY: none, and all weigh the
// same.
struct Range {
  int32_t first, last;
  enum Kind : int32_t { DENSE, HOLES, EMPTY } kind;
};

// A tile is some rows of one key head; row r is position r / repeats of its query head r % repeats
// (GQA). Or it is all rows of several key heads that are adjacent in memory: h * rows + r.
struct Attention {
  const toast_attention *call;
  void *out;
  int32_t out_type;
  const int64_t *out_strides;
  int64_t repeats;      // query heads per key head
  int64_t rows;         // per key head
  int64_t row_floats;   // per row of Partial::sums: the weighted values, then the sum of weights
  const Range *ranges;  // (batches, heads, positions) of the mask; strides of 0 broadcast
  int64_t range_strides[2];
  const int64_t *origin;  // (batch): the key that spans are counted from

  Range range(int64_t batch, int64_t head, int64_t position) const {
    return ranges[batch * range_strides[0] + head * range_strides[1] + position];
  }
};

// Partial softmax results of a tile.
struct Partial {
  float *max;   // (heads * rows)
  float *sums;  // (heads * rows, row_floats)
};

struct Tile {
  int64_t batch, head, first, rows;  // head: the first key head; rows: of each
  int64_t heads;
  const char *queries;  // as `prepare` has stored them

  Tile of_head(int64_t h) const { return {batch, head + h, first, rows, 1, nullptr}; }
};

// The attention kernel of one instruction set.
struct AttentionCode {
  int64_t (*tile_rows)(const Attention &);   // rows per tile
  int64_t (*tile_heads)(const Attention &);  // key heads per tile, at most
  int64_t (*row_floats)(int64_t value_size);
  // Bytes of a tile's queries, prepared once for all spans, a multiple of 64; 0: not prepared.
  int64_t (*prepared_bytes)(const Attention &, int64_t tile_rows, int64_t tile_heads);
  void (*prepare)(const Attention &, const Tile &, char *to);
  // Sets `out` to the partial result of keys [begin, end); false if out of memory.
  bool (*attend)(const Attention &, const Tile &, int64_t begin, int64_t end, Partial out);
  // Merges a later span's partial result, which it overwrites.
  void (*merge)(const Attention &, int64_t rows, Partial to, Partial from);
  void (*finish)(const Attention &, const Tile &, Partial);
};

}  // namespace toast
