// The gated delta rule (arXiv 2412.06464), step by step, in float32. For each value head and row of
// its state S (value_size, key_size), with key k, query q, value v of a step:
//
//   S <- decay S;  S <- S + rate (v - S k) k;  y = S q
//
// decay = exp(-exp(a_log) softplus(a + bias)), rate = rate_factor / (1 + exp(-b)). Rows do not
// know of each other, and a step not of how many there are: a chunk gives what its steps give.
#pragma once

#include <stdint.h>

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// All contiguous, float32. A key head serves value_heads / key_heads value heads, one after
// another.
typedef struct {
  int64_t batch, length, key_heads, value_heads, key_size, value_size;
  const float *q, *k;          // (batch, length, key_heads, key_size)
  const float *v;              // (batch, length, value_heads, value_size)
  const float *a, *b;          // (batch, length, value_heads)
  const float *a_log, *bias;   // (value_heads)
  float rate_factor;
  const uint8_t *mask;         // (batch, length): steps that change the state; NULL for all
  const float *state;          // (batch, value_heads, value_size, key_size); NULL for zeros
} toast_delta;

// y: (batch, length, value_heads, value_size). after: of the shape of the state, not at its place.
// Returns 0; 1 for heads that do not fit, 2 for no memory.
TOAST_API int toast_gated_delta(const toast_delta *delta, float *y, float *after);

#ifdef __cplusplus
}

namespace toast {

// What a call asks for. decays, rates: (batch, length, value_heads).
struct Delta {
  const toast_delta *of;
  const float *decays, *rates;
  float *y, *after;
};

// One instruction set's code: rows of the state of a head, of all heads of a batch, from first to
// end. False for no memory.
using DeltaRows = bool (*)(const Delta &, int64_t head, int64_t first, int64_t end);

}  // namespace toast
#endif
