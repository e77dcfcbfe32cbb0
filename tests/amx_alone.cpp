// Stands for the other instruction sets where that of AMX is compiled alone, to be tested by
// itself: there are none of them.
#include "product.h"

namespace toast {

const Instructions avx512vbmi = {"avx512vbmi",
                                 [] { return bool(__builtin_cpu_supports("avx512vbmi")); }};
const Instructions avx512vnni = {"avx512vnni", [] { return false; }};
const Instructions avxvnni = {"avxvnni", [] { return false; }};
const Instructions avx2 = {"avx2", [] { return false; }};
const Instructions portable = {"portable", [] { return true; }};
const RowInstructions avx512_rows = {};
const AttentionCode avx512_attention = {};

}  // namespace toast
