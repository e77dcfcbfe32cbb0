// Attention on its way: what an instruction set's code is handed.
//
// The keys of a batch are divided into spans, counted from the first key that any of its queries
// sees. Of a span come, for each query, the largest score, the sum of the exponentials of scores
// less that, and the values weighted with them; spans are put together in their order. Which
// thread took a span, how many queries came with one and what is hidden besides changes no bit.
#pragma once

#include "kernels.h"

namespace toast {

constexpr int64_t SPAN = 512;       // keys
constexpr int64_t SUM_CHAINS = 16;  // chains that a span's weights are added up in, key by key in
                                    // turn

// The keys that a query sees: from first to last. HOLES: but not all of them. BLIND: none, and all
// weigh the same.
struct Range {
  int32_t first, last;
  enum Kind : int32_t { DENSE, HOLES, EMPTY } kind;
};

// A tile is some rows of a key head in a batch; row r is query r / repeats of head r % repeats. Or
// all rows of several heads, whose keys lie side by side: row r of head h is then h * rows + r.
struct Attention {
  const toast_attention *call;
  void *out;
  int32_t out_type;
  const int64_t *out_strides;
  int64_t repeats;      // heads of queries to one of keys
  int64_t rows;         // of a key head
  int64_t row_floats;   // of a row that is summed up: the values, and their weights
  const Range *ranges;  // (batches, heads, positions) of the mask, where it is one of each
  int64_t range_strides[2];
  const int64_t *origin;  // (batch): the key that spans are counted from

  Range range(int64_t batch, int64_t head, int64_t position) const {
    return ranges[batch * range_strides[0] + head * range_strides[1] + position];
  }
};

// What comes of a tile's rows in some spans: their largest score; sums of weighted values and
// weights.
struct Partial {
  float *max;   // (heads * rows)
  float *sums;  // (heads * rows, row_floats)
};

struct Tile {
  int64_t batch, head, first, rows;  // head: the first of the keys'; rows: of each
  int64_t heads;
  const char *queries;  // as `prepare` has left them

  Tile of_head(int64_t h) const { return {batch, head + h, first, rows, 1, nullptr}; }
};

// One instruction set's code.
struct AttentionCode {
  int64_t (*tile_rows)(const Attention &);   // that a tile has
  int64_t (*tile_heads)(const Attention &);  // and heads, at most
  int64_t (*row_floats)(int64_t value_size);
  // What a tile's queries take where they are prepared once for all spans, a multiple of 64; or 0.
  int64_t (*prepared_bytes)(const Attention &, int64_t tile_rows, int64_t tile_heads);
  void (*prepare)(const Attention &, const Tile &, char *to);
  // Sets `out` to what comes of the keys from begin up to end; false for no memory.
  bool (*attend)(const Attention &, const Tile &, int64_t begin, int64_t end, Partial out);
  // Puts what comes of a later span, which is lost, to what came before.
  void (*merge)(const Attention &, int64_t rows, Partial to, Partial from);
  void (*finish)(const Attention &, const Tile &, Partial);
};

}  // namespace toast
