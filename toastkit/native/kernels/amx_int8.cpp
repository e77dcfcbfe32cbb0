// Kernels for AMX int8: GEMM, and attention over int8 keys and values.
#include "product.h"

#if defined(__AMX_INT8__)

#include "amx.h"
#define TILE_M 6
#define TILE_N 4
#include "attention_amx.h"
#include "digit_panels.h"

namespace toast {

static bool is_available() {
  static const bool granted = avx512vbmi.is_available() && tiles_are_granted();
  return granted;
}

constexpr int64_t MIN_BATCH = 6;  // fewer vectors are faster without tiles

// Small batches use VBMI's kernel, on the same prepared vectors; a test of this file alone has
// none.
static bool multiply_amx(const Product &p, const ExpertBatch &batch, int64_t first, int64_t end) {
  const auto few = avx512vbmi.multiply;
  return (few && batch.size < MIN_BATCH ? few : multiply)(p, batch, first, end);
}

constexpr int64_t MIN_QUERIES = 3;  // per key head; fewer are memory-bound, and more so with tiles

// Whether this attention runs on tiles; else it takes AVX-512's code, which a test of this file
// alone has not.
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

#else  // the compiler lacks AMX

namespace toast {

const Instructions amx_int8 = {"amx_int8", [] { return false; }};

}  // namespace toast

#endif
