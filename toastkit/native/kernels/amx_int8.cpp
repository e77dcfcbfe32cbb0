// The code for processors with AMX for bytes too: many vectors meet packed numbers in tiles.
#include "product.h"

#if defined(__AMX_INT8__)

#include "amx.h"
#define TILE_M 6
#define TILE_N 4
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

const Instructions amx_int8 = {
    "amx_int8",     there,        prepared_bytes,    prepare,
    multiply_tiled, &avx512_rows, &avx512_attention, MOST_MEMBERS};

}  // namespace toast

#else  // a compiler that does not know them

namespace toast {

const Instructions amx_int8 = {"amx_int8", [] { return false; }};

}  // namespace toast

#endif
