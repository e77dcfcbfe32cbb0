// The code for ARM processors with matrix products of bytes: ARMv8.6, or i8mm before it.
#define TILE_M 4
#define TILE_N 4
#include "digits_neon.h"

namespace toast {

static bool is_available() { return has(DOTPROD) && has(I8MM); }

const Instructions neon_i8mm = {
    "neon_i8mm", is_available, prepared_bytes, prepare, multiply, &neon_rows, &neon_attention};

}  // namespace toast
