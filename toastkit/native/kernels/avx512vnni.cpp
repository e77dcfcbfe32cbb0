// Kernels for AVX-512 F, BW, DQ, VL and VNNI.
#define TILE_M 6
#define TILE_N 4
#include "attention_tile.h"
#include "digit_panels.h"
#include "row_functions.h"

namespace toast {

static bool is_available() {
  return avx2.is_available() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

const RowInstructions avx512_rows = row_functions;
const AttentionCode avx512_attention = attention;
const Instructions avx512vnni = {
    "avx512vnni", is_available, prepared_bytes,    prepare,
    multiply,     &avx512_rows, &avx512_attention, MAX_BATCH};

}  // namespace toast
