// The code for processors with AMX for bytes too: many vectors meet packed numbers in tiles.
#include "product.h"

#if defined(__AMX_INT8__)

#include "amx.h"
#define TILE_M 6
#define TILE_N 4
#include "attention_amx.h"
#include "digit_tiles.h"

namespace toast {

static bool there() {
  static const bool granted = avx512vbmi.there() && tiles_are_granted();
  return granted;
}

constexpr int64_t LEAST_MEMBERS = 8;  // fewer are over sooner without tiles

// Those are as they were prepared. Where this is tested alone, there is nobody else.
static bool multiply_tiled(const Product &p, const Group &group, int64_t first, int64_t end) {
  const auto few = avx512vbmi.multiply;
  return (few && group.members < LEAST_MEMBERS ? few : multiply)(p, group, first, end);
}

constexpr int64_t LEAST_QUERIES = 3;  // to a key; fewer wait for memory, and longer with tiles

// Whether keys and values are met in tiles. Others go on as they do without, but where this is
// tested alone.
static bool is_tiled(const Attention &a) {
  return in_bytes(a.call->keys) && in_bytes(a.call->values) &&
         (a.rows >= LEAST_QUERIES || !avx512_attention.attend);
}

static const AttentionCode tiled_attention = {
    [](const Attention &a) {
      return is_tiled(a) ? std::min<int64_t>(a.rows, WIDE) : avx512_attention.tile_rows(a);
    },
    [](const Attention &a) {
      return is_tiled(a) ? std::max<int64_t>(WIDE / a.rows, 1) : avx512_attention.tile_heads(a);
    },
    row_floats,
    [](const Attention &a, int64_t tile_rows, int64_t tile_heads) {
      return is_tiled(a) ? columns_bytes(tile_heads, tile_rows, a.call->key_size)
                             : avx512_attention.prepared_bytes(a, tile_rows, tile_heads);
    },
    [](const Attention &a, const Tile &tile, char *to) {
      (is_tiled(a) ? prepare_columns : avx512_attention.prepare)(a, tile, to);
    },
    [](const Attention &a, const Tile &tile, int64_t begin, int64_t end, Sums out) {
      return (is_tiled(a) ? attend_in_tiles : avx512_attention.attend)(a, tile, begin, end, out);
    },
    add_sums,
    finish_rows,
};

const Instructions amx_int8 = {
    "amx_int8",     there,        prepared_bytes,   prepare,
    multiply_tiled, &avx512_rows, &tiled_attention, MOST_MEMBERS};

}  // namespace toast

#else  // a compiler that does not know them

namespace toast {

const Instructions amx_int8 = {"amx_int8", [] { return false; }};

}  // namespace toast

#endif
