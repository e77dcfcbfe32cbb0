// Kernels for AVX2 and AVX-VNNI: Intel since 2021 without AVX-512, AMD since Zen 5.
#include <cpuid.h>

#include "product.h"

#ifdef __AVXVNNI__
static const toast::Instructions &in_float32 = toast::avx2;
#include "digits16.h"
#endif

namespace toast {

#ifdef __AVXVNNI__
static bool is_available() {
  unsigned a, b, c, d;
  return avx2.is_available() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

const Instructions avxvnni = {"avxvnni", is_available, prepared_bytes, prepare,
                              multiply,  &avx2_rows,   &avx2_attention};
#else
const Instructions avxvnni = {"avxvnni", [] { return false; }};
#endif

}  // namespace toast
