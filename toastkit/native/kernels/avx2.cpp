// The code for processors with AVX2, FMA, F16C and BMI2.
#define TILE_M 2
#define TILE_N 4
#include "attention_tile.h"
#include "floats.h"
#include "row_functions.h"

namespace toast {

static bool there() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

const Instructions avx2 = {"avx2",          there,           floats_bytes,
                           prepare_floats,  multiply_floats, &row_functions, &attention};

}  // namespace toast
