// The code for processors with AVX-512 F, BW, DQ, VL and VNNI.
#define TILE_M 6
#define TILE_N 4
#include "digits.h"

namespace toast {

static bool there() {
  return avx2.there() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

static bool in_digits(const Product &p) { return p.matrix->bits && !p.exact; }

static int64_t prepared_bytes(const Product &p) {
  if (!in_digits(p)) return floats_bytes(p);
  return p.matrix->bits == 4 ? Layout<true>::of(*p.matrix).bytes
                             : Layout<false>::of(*p.matrix).bytes;
}

static void prepare(const Product &p, int64_t row) {
  if (!in_digits(p)) return prepare_floats(p, row);
  return p.matrix->bits == 4 ? prepare_digits<true>(p, row) : prepare_digits<false>(p, row);
}

static bool multiply(const Product &p, const Group &group, int64_t first, int64_t end) {
  if (!in_digits(p)) return multiply_floats(p, group, first, end);
  return p.matrix->bits == 4 ? multiply_digits<true>(p, group, first, end)
                             : multiply_digits<false>(p, group, first, end);
}

const Instructions avx512vnni = {"avx512vnni", there, prepared_bytes, prepare, multiply};

}  // namespace toast
