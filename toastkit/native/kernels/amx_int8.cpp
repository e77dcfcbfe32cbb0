// The code for processors with AMX for bytes too: many vectors meet packed numbers in tiles.
#include "product.h"

#if defined(__AMX_INT8__)

#include "amx.h"
#define TILE_M 6
#define TILE_N 4
#include "attention_amx.h"
#include "digit_tiles.h"

namespace toast {

static bool is_available() {
  static const bool granted = avx512vbmi.is_available() && tiles_are_granted();
  return granted;
}

constexpr int64_t MIN_BATCH = 8;  // fewer are over sooner without tiles

// Those are as they were prepared. Where this is tested alone, there is nobody else.
static bool multiply_amx(const Product &p, const ExpertBatch &batch, int64_t first, int64_t end) {
  const auto few = avx512vbmi.multiply;
  return (few && batch.size < MIN_BATCH ? few : multiply)(p, batch, first, end);
}

constexpr int64_t MIN_QUERIES = 3;  // to a key; fewer wait for memory, and longer with tiles

// Whether keys and values are met in tiles. Others go on as they do without, but where this is
// tested alone.
static bool uses_amx(const Attention &a) {
  return is_int8(a.call->keys) && is_int8(a.call->values) &&
         (a.rows >= MIN_QUERIES || !avx512_attention.attend);
}

static const AttentionCode amx_attention = {
    [](const Attention &a) {
      return uses_amx(a) ? std::min<int64_t>(a.rows, TILE_QUERIES) : avx512_attention.tile_rows(a);
    },
    [](const Attention &a) {
      return uses_amx(a) ? std::max<int64_t>(TILE_QUERIES / a.rows, 1)
                        : avx512_attention.tile_heads(a);
    },
    row_floats,
    [](const Attention &a, int64_t tile_rows, int64_t tile_heads) {
      return uses_amx(a) ? columns_bytes(tile_heads, tile_rows, a.call->key_size)
                             : avx512_attention.prepared_bytes(a, tile_rows, tile_heads);
    },
    [](const Attention &a, const Tile &tile, char *to) {
      (uses_amx(a) ? prepare_columns : avx512_attention.prepare)(a, tile, to);
    },
    [](const Attention &a, const Tile &tile, int64_t begin, int64_t end, Partial out) {
      return (uses_amx(a) ? attend_in_tiles : avx512_attention.attend)(a, tile, begin, end, out);
    },
    merge_partials,
    finish_rows,
};

const Instructions amx_int8 = {
    "amx_int8",     is_available,        prepared_bytes,   prepare,
    multiply_amx, &avx512_rows, &amx_attention, MAX_BATCH};

}  // namespace toast

#else  // a compiler that does not know them

namespace toast {

const Instructions amx_int8 = {"amx_int8", [] { return false; }};

}  // namespace toast

#endif
