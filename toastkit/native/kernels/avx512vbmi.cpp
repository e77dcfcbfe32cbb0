// Kernels for AVX-512 VBMI: codes of 2, 3, 5 and 6 bits are unpacked in registers.
#define TILE_M 6
#define TILE_N 4
#include "digit_panels.h"

namespace toast {

// All others take VNNI's code, compiled to the same instructions.
static bool multiply_here(const Product &p, const ExpertBatch &batch, int64_t first, int64_t end) {
  const bool own = !in_floats(p) && is_narrow(*p.matrix);
  return (own ? multiply_narrow : avx512vnni.multiply)(p, batch, first, end);
}

static bool is_available() {
  return avx512vnni.is_available() && __builtin_cpu_supports("avx512vbmi");
}

const Instructions avx512vbmi = {
    "avx512vbmi",  is_available, prepared_bytes,    prepare,
    multiply_here, &avx512_rows, &avx512_attention, MAX_BATCH};

}  // namespace toast
