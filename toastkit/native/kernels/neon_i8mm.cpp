// Kernels for ARM int8 matrix products: ARMv8.6, or earlier with i8mm.
#include "digits16.h"

namespace toast {

static bool is_available() { return has(DOTPROD) && has(I8MM); }

const Instructions neon_i8mm = {
    "neon_i8mm", is_available, prepared_bytes, prepare, multiply, &neon_rows, &neon_attention};

}  // namespace toast
