// Kernels for any processor.
#define TILE_M 2
#define TILE_N 4
#include "attention_tile.h"
#include "floats.h"
#include "row_functions.h"

namespace toast {

const Instructions portable = {
    "portable",     [] { return true; }, float_bytes, prepare_floats,
    multiply_floats, &row_functions,      &attention};

}  // namespace toast
