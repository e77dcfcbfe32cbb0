// Recurrent layers, step by step, in float32: rows of a state do not know of each other, and a step
// not of how many there are: a chunk gives, to the bit, what its steps give.
//
// The gated delta rule (arXiv 2412.06464). For each value head and row of its state S (value_size,
// key_size), with key k, query q, value v of a step:
//
//   S <- decay S;  S <- S + rate (v - S k) k;  y = S q
//
// decay = exp(-exp(a_log) softplus(a + bias)), rate = rate_factor / (1 + exp(-b)). A key head
// serves value_heads / key_heads value heads, one after another. Or each column of S has a decay of
// its own, of an a and a bias of its own (Kimi Delta Attention, arXiv 2510.26692), or is given it.
#pragma once

#include <stdint.h>

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// All contiguous, float32.
typedef struct {
  int64_t batch, length, key_heads, value_heads, key_size, value_size;
  const float *q, *k;         // (batch, length, key_heads, key_size)
  const float *v;             // (batch, length, value_heads, value_size)
  const float *a, *b;         // (batch, length, value_heads)
  const float *a_log, *bias;  // (value_heads); NULL where a has decays
  float rate_factor;
  int32_t columns;      // a and bias, and decays always, have an axis key_size more
  const uint8_t *mask;  // (batch, length): steps that change the state; NULL for all
  const float *state;   // (batch, value_heads, value_size, key_size); NULL for zeros
} toast_delta;

// y: (batch, length, value_heads, value_size). after: of the shape of the state; may lie there.
// Returns 0; 1 for heads that do not fit, 2 for no memory.
TOAST_API int toast_gated_delta(const toast_delta *delta, float *y, float *after);

// What a layer projects its steps to, (batch, length, key_heads, n): numbers from one step, and
// from one key head, to the next.
typedef struct {
  const float *data;
  int64_t step, head;
} toast_projection;

// All of a layer of gated delta rules (Qwen3-Next's) but its products, float32. Queries, keys and
// values are convolved and go through SiLU (toast_convolution, rows.h); queries and keys are
// brought to length key_size^-1/2 and 1 (1e-6 under the root), the rule is applied; what it gives
// is normalised head by head (toast_rms_norm), times SiLU of z.
typedef struct {
  int64_t batch, length, key_heads, value_heads, key_size, value_size;
  toast_projection q, k;  // n: key_size
  toast_projection v, z;  // value_heads / key_heads * value_size
  toast_projection a, b;  // value_heads / key_heads
  int64_t kernel;         // positions of the convolution
  const float *weight;    // (channels, kernel): of all queries, keys, values
  const float *before;    // (batch, kernel - 1, channels): what came before; NULL for zeros
  const float *a_log, *bias;
  const float *norm;  // (value_size)
  float eps;
  const float *state;  // as in toast_delta
} toast_delta_layer;

// y: (batch, length, value_heads, value_size). last: as `before`, for the next steps; may not lie
// there. after: as above. Returns as toast_gated_delta.
TOAST_API int toast_delta_layer_steps(const toast_delta_layer *layer, float *y, float *last,
                                      float *after);

// Mamba-2's scan (arXiv 2405.21060). For each head and row of its state S (size, state_size), with
// x (size), and B and C of the head's group, of a step:
//
//   S <- exp(-exp(a_log) dt) S + dt x B;  y = S C + d x
//
// dt = softplus(dt + bias), no less than `least` and no more than `most`. A group serves heads /
// groups heads, one after another. Or the selective scan of Mamba (arXiv 2312.00752, algorithm 2):
// each row has its dt and d, each number of a state its a_log. All contiguous, float32.
typedef struct {
  int64_t batch, length, heads, size, groups, state_size;
  const float *x;                 // (batch, length, heads, size)
  const float *b, *c;             // (batch, length, groups, state_size)
  const float *dt;                // (batch, length, heads); selective: with an axis `size` more
  const float *a_log, *d, *bias;  // (heads); selective: (heads, size), a_log with state_size more
  float least, most;
  int32_t selective;
  const uint8_t *mask;  // as in toast_delta
  const float *state;   // (batch, heads, size, state_size); NULL for zeros
} toast_scan;

// y: of the shape of x. after: of the shape of the state; may lie there. Returns as
// toast_gated_delta.
TOAST_API int toast_scan_steps(const toast_scan *scan, float *y, float *after);

// The generalised delta rule of RWKV-7 (arXiv 2503.14456, equation 17). For each head, its state S
// (size, size), and r, w, k, v, a, b (size) of a step:
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

// The linear recurrence of Griffin's RG-LRU (arXiv 2402.19427, equation 4), its gates multiplied
// out: h <- decay h + x, for each channel. All contiguous, float32.
typedef struct {
  int64_t batch, length, channels;
  const float *decays, *x;  // (batch, length, channels)
  const float *state;       // (batch, channels); NULL for zeros
} toast_linear;

// h: of the shape of x, after each step.
TOAST_API void toast_linear_steps(const toast_linear *linear, float *h);

#ifdef __cplusplus
}

namespace toast {

// Steps of one head; `step`s are numbers from one to the next. past: `after` is written past the
// caches, and does not lie where the state does.
struct DeltaHead {
  int64_t length, key_size;
  bool streaming;
  const float *q, *k;
  int64_t key_step;
  const float *v;
  int64_t value_step;
  const float *decays, *rates;
  int64_t gate_step;
  bool columns;  // have decays of their own: a step has key_size of them, not one
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
  // Where it is selective, and has no decays: dt as it is given.
  const float *a_log = nullptr, *bias = nullptr;
  float least = 0, most = 0;
};

struct WkvHead {
  int64_t length, size, step;  // of all that it is given and gives
  bool streaming;
  const float *r, *w, *k, *v, *a, *b, *state;
  float *y, *after;
};

// One instruction set's code: rows of the head's state, from first to end. False for no memory.
struct RecurrentCode {
  bool (*delta)(const DeltaHead &, int64_t first, int64_t end);
  bool (*scan)(const ScanHead &, int64_t first, int64_t end);
  bool (*wkv)(const WkvHead &, int64_t first, int64_t end);
  void (*linear)(const toast_linear &, int64_t batch, int64_t first, int64_t end, float *h);
  // exp(-exp(a_log) softplus(a + bias)) of so many columns.
  void (*decays)(const float *a, const float *bias, float a_log, int64_t count, float *out);
};

}  // namespace toast
#endif
