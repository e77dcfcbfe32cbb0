// Kernels for ARM int8 dot products: ARMv8.2 with dotprod, as most since 2018.
#include "digits16.h"

namespace toast {

static bool is_available() { return has(DOTPROD); }

const Instructions neon_dotprod = {
    "neon_dotprod", is_available, prepared_bytes, prepare, multiply, &neon_rows, &neon_attention};

}  // namespace toast
