// Kernels for any AArch64 processor (128-bit NEON).
#define TILE_M 4
#define TILE_N 4
#include "attention_tile.h"
#include "floats.h"
#include "row_functions.h"

#ifdef __linux__
#include <sys/auxv.h>
#endif

namespace toast {

bool has(ArmFeature feature) {
#ifdef __linux__  // HWCAP_ASIMDDP and HWCAP2_I8MM
  return feature == DOTPROD ? getauxval(AT_HWCAP) >> 20 & 1 : getauxval(AT_HWCAP2) >> 13 & 1;
#else
  return false;
#endif
}

static bool is_available() { return true; }

const RowInstructions neon_rows = row_functions;
const AttentionCode neon_attention = attention;
const Instructions neon = {"neon",         is_available,           float_bytes,
                           prepare_floats, multiply_floats, &neon_rows, &neon_attention};

}  // namespace toast
