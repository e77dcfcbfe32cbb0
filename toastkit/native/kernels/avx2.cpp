// Kernels for AVX2, FMA, F16C and BMI2.
#include <cpuid.h>

#define TILE_M 2
#define TILE_N 4
#include "attention_tile.h"
#include "floats.h"
#include "row_functions.h"

// Before digits16.h: what it does not multiply.
static const toast::Instructions in_float32 = {"", nullptr, float_bytes, prepare_floats,
                                               multiply_floats};
#include "digits16.h"

namespace toast {

// Some versions of clang (14) have no __builtin_cpu_supports("f16c").
static bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

static bool is_available() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
         __builtin_cpu_supports("bmi2");
}

const RowInstructions avx2_rows = row_functions;
const AttentionCode avx2_attention = attention;
const Instructions avx2 = {"avx2",   is_available, prepared_bytes, prepare,
                           multiply, &avx2_rows,   &avx2_attention};

}  // namespace toast
