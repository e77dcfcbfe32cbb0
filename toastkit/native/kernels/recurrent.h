// Recurrent layers, step by step, in float32. Rows of a state are independent, and a step does not
// know the length: a chunk gives, to the bit, what its steps give.
//
// The gated delta rule (arXiv 2412.06464). For each value head and row of its state S (value_size,
// key_size), with a step's key k, query q and value v:
//
//   S <- decay S;  S <- S + rate (v - S k) k;  y = S q
//
// decay = exp(-exp(a_log) softplus(a + bias)), rate = rate_factor * sigmoid(b). A key head serves
// value_heads / key_heads adjacent value heads. With `columns`, each column of S has its own decay
// (Kimi Delta Attention, arXiv 2510.26692), from its own a and bias, or given.
#pragma once

#include <stdint.h>

#include "kernels.h"

extern "C" {

// All contiguous, float32.
typedef struct {
  int64_t batch, length, key_heads, value_heads, key_size, value_size;
  const float *q, *k;         // (batch, length, key_heads, key_size)
  const float *v;             // (batch, length, value_heads, value_size)
  const float *a, *b;         // (batch, length, value_heads)
  const float *a_log, *bias;  // (value_heads); both NULL if `a` holds decays
  float rate_factor;
  int32_t columns;      // a and bias have a last axis of key_size; required if `a` holds decays
  const uint8_t *mask;  // (batch, length): steps with 0 leave the state; NULL for none
  const float *state;   // (batch, value_heads, value_size, key_size); NULL for zeros
} toast_delta;

// y: (batch, length, value_heads, value_size). after: the new state; may alias `state`. Returns 0;
// 1 for head counts that do not fit, 2 if out of memory.
TOAST_API int toast_gated_delta(const toast_delta *delta, float *y, float *after);

// A projection of a layer's input, (batch, length, key_heads, n); step, head: strides in elements.
typedef struct {
  const float *data;
  int64_t step, head;
} toast_projection;

// A gated delta layer (Qwen3-Next) without its matrix products, float32: convolution and SiLU of q,
// k, v (toast_convolution in rows.h); q and k normalised to length key_size^-1/2 and 1 (eps of 1e-6
// under the root); the delta rule; RMSNorm of each head; times SiLU(z).
typedef struct {
  int64_t batch, length, key_heads, value_heads, key_size, value_size;
  toast_projection q, k;  // n: key_size
  toast_projection v, z;  // n: value_heads / key_heads * value_size
  toast_projection a, b;  // n: value_heads / key_heads
  int64_t kernel;         // of the convolution
  const float *weight;    // (channels, kernel); channels: all of q, k, v
  const float *before;    // (batch, kernel - 1, channels): previous positions; NULL for zeros
  const float *a_log, *bias;
  const float *norm;  // (value_size)
  float eps;
  const float *state;  // as in toast_delta
} toast_delta_layer;

// y: (batch, length, value_heads, value_size). last: `before` of the next call, not aliasing
// `before`. after: as above. Returns as toast_gated_delta.
TOAST_API int toast_delta_layer_steps(const toast_delta_layer *layer, float *y, float *last,
                                      float *after);

// Mamba-2's scan (arXiv 2405.21060). For each head and row of its state S (size, state_size), with
// a step's x (size), and B and C of the head's group:
//
//   S <- exp(-exp(a_log) dt) S + dt x B;  y = S C + d x
//
// dt = softplus(dt + bias), clamped to [least, most]. A group serves heads / groups adjacent heads.
// selective: Mamba's scan (arXiv 2312.00752, algorithm 2), where each row has its own dt and d, and
// each element of a state its own a_log. All contiguous, float32.
typedef struct {
  int64_t batch, length, heads, size, groups, state_size;
  const float *x;                 // (batch, length, heads, size)
  const float *b, *c;             // (batch, length, groups, state_size)
  const float *dt;                // (batch, length, heads); selective: (..., size)
  const float *a_log, *d, *bias;  // (heads); selective: (heads, size), a_log (..., state_size)
  float least, most;
  int32_t selective;
  const uint8_t *mask;  // as in toast_delta
  const float *state;   // (batch, heads, size, state_size); NULL for zeros
} toast_scan;

// y: shaped as x. after: the new state; may alias `state`. Returns as toast_gated_delta.
TOAST_API int toast_scan_steps(const toast_scan *scan, float *y, float *after);

// RWKV-7's generalised delta rule (arXiv 2503.14456, equation 17). For each head and its state S
// (size, size), with a step's r, w, k, v, a, b (size):
//
//   S <- S diag(w) + (S a) b' + v k';  y = S r
//
// All contiguous, float32.
typedef struct {
  int64_t batch, length, heads, size;
  const float *r, *w, *k, *v, *a, *b;  // (batch, length, heads, size)
  const float *state;                  // (batch, heads, size, size); NULL for zeros
} toast_wkv;

// As toast_scan_steps.
TOAST_API int toast_wkv_steps(const toast_wkv *wkv, float *y, float *after);

// RWKV-7's time mixing without its matrix products. With what is projected, of which w, share and a
// are logits, and f, v of the first layer:
//
//   w <- exp(-0.606531 sigmoid(w));  v <- v + (f - v) sigmoid(share);  a <- sigmoid(a)
//   n = k k_k / max(|k k_k|, 1e-7);  k <- k (1 + (a - 1) k_a)
//   y = (LayerNorm(wkv(r, w, k, v, -n, n a)) + (r k r_k summed) v) g
//
// All contiguous, float32. What is not const is overwritten; b is memory for it.
typedef struct {
  int64_t batch, length, heads, size;
  const float *r, *g, *f;              // (batch, length, heads, size); f: NULL in the first layer
  float *w, *k, *v, *a, *b, *share;    // likewise; share: NULL with f
  const float *k_k, *k_a, *r_k;        // (heads, size)
  const float *norm, *norm_bias;       // (heads, size)
  float eps;
  const float *state;  // as in toast_wkv
} toast_time_mixing;

// As toast_scan_steps.
TOAST_API int toast_time_mixing_steps(const toast_time_mixing *mixing, float *y, float *after);

// RWKV's token shift: x + (the x before - x) mix. x, out: (batch, length, columns); before: (batch,
// columns), NULL for zeros; mix: (columns). All contiguous, float32.
TOAST_API void toast_token_shift(const float *x, const float *before, int64_t batch,
                                 int64_t length, int64_t columns, const float *mix, float *out);

// The linear recurrence of Griffin's RG-LRU (arXiv 2402.19427, equation 4), with its gates applied:
// h <- decay h + x, per channel. All contiguous, float32.
typedef struct {
  int64_t batch, length, channels;
  const float *decays, *x;  // (batch, length, channels)
  const float *state;       // (batch, channels); NULL for zeros
} toast_linear;

// h: shaped as x, after each step.
TOAST_API void toast_linear_steps(const toast_linear *linear, float *h);

}  // extern "C"

namespace toast {

// One head; `..._step`: elements from step to step. streaming: write `after` by non-temporal
// stores; it does not alias the state.
struct DeltaHead {
  int64_t length, key_size;
  bool streaming;
  const float *q, *k;
  int64_t key_step;
  const float *v;
  int64_t value_step;
  const float *decays, *rates;
  int64_t gate_step;
  bool columns;  // key_size decays per step, not one
  const uint8_t *mask;
  const float *state;  // NULL for zeros
  float *y;
  int64_t y_step;
  float *after;
};

struct ScanHead {
  int64_t length, state_size;
  bool streaming;
  const float *x, *b, *c;
  int64_t x_step, group_step;  // of x and y; of b and c
  const float *decays, *dt;
  int64_t gate_step;
  const float *d;
  const uint8_t *mask;
  const float *state;
  float *y, *after;
  // Selective, instead of decays: dt is as given.
  const float *a_log = nullptr, *bias = nullptr;
  float least = 0, most = 0;
};

struct WkvHead {
  int64_t length, size, step;  // of all inputs and y
  bool streaming;
  const float *r, *w, *k, *v, *a, *b, *state;
  float *y, *after;
};

// The recurrent kernels of one instruction set: rows [first, end) of a head's state. False if out
// of memory.
struct RecurrentCode {
  bool (*delta)(const DeltaHead &, int64_t first, int64_t end);
  bool (*scan)(const ScanHead &, int64_t first, int64_t end);
  bool (*wkv)(const WkvHead &, int64_t first, int64_t end);
  void (*linear)(const toast_linear &, int64_t batch, int64_t first, int64_t end, float *h);
  // exp(-exp(a_log) softplus(a + bias)), (count).
  void (*decays)(const float *a, const float *bias, float a_log, int64_t count, float *out);
};

}  // namespace toast
