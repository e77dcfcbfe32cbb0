// Row-wise operations, computed in float32 whatever the element type. Rows are independent: a batch
// gives, to the bit, what its rows give. The C interface, then the table of kernels.
#pragma once

#include "kernels.h"
#include "recurrent.h"

extern "C" {

// (batch, heads, length, size); strides of the first three axes, in elements.
typedef struct {
  const void *data;
  int64_t batch, heads, length, size;
  int64_t strides[3];
  int32_t type;
} toast_heads;

// RoPE (arXiv 2104.09864) over the first `dims` elements of a head. Pairs are i and i + dims / 2,
// or neighbours if `traditional`. Pair i is rotated by (offset + index in length) * scale *
// frequency radians, each product rounded to float32.
typedef struct {
  int64_t dims;
  const float *frequencies;  // (dims / 2)
  int32_t inverse;           // frequencies are given as 1 / frequency
  const int32_t *offsets;    // (offset_count)
  int64_t offset_count;      // batch, or 1 for all of it
  float scale;
  float factor;  // multiplies the rotated elements
  int32_t traditional;
} toast_rotation;

// GELU: tanh approximation; ERF: exact GELU. OAI (gpt-oss): with x clamped to [-7, 7] and gate to
// at most 7, (x + 1) * gate * sigmoid(1.702 * gate). FINITE: NaN to 0, +-infinity to +-1e4. RELU2:
// max(x, 0)^2.
enum {
  TOAST_SILU = 0, TOAST_GELU = 1, TOAST_SIGMOID = 2, TOAST_ERF = 3, TOAST_OAI = 4, TOAST_FINITE = 5,
  TOAST_RELU2 = 6
};

// All return 0; 1 for unsupported arguments, 2 if out of memory. Outputs are contiguous.

// RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * (weight + plus). weight: (columns), NULL
// for zeros.
TOAST_API int toast_rms_norm(const toast_vectors *x, int64_t columns, const void *weight,
                             int32_t weight_type, float plus, float eps, void *out,
                             int32_t out_type);

// LayerNorm (arXiv 1607.06450): (x - mean) / sqrt(variance + eps) * weight + bias. weight, bias:
// (columns), of one type; NULL for ones and zeros.
TOAST_API int toast_layer_norm(const toast_vectors *x, int64_t columns, const void *weight,
                               const void *bias, int32_t weight_type, float eps, void *out,
                               int32_t out_type);

// out: (batch, heads, length, size), of x's type.
TOAST_API int toast_rotate(const toast_heads *x, const toast_rotation *rotation, void *out);

// Gated activation (SwiGLU and kin, arXiv 2002.05202): activation(gate) * x, elementwise; x: NULL
// for ones. All of one type.
TOAST_API int toast_gate(const void *gate, const void *x, int64_t count, int32_t type,
                         int32_t activation, void *out);

// x[i] += rows[which[i]], float32: x (count, columns), rows (stack, columns). which: NULL for 0;
// indices out of range add nothing.
TOAST_API int toast_add_rows(float *x, int64_t count, int64_t columns, const float *rows,
                             int64_t stack, const uint32_t *which);

// Softmax of each row, (count, columns); or its log-sum-exp, float32 (count).
TOAST_API int toast_softmax(const toast_vectors *x, int64_t columns, void *out, int32_t out_type);
TOAST_API int toast_log_sum_exp(const toast_vectors *x, int64_t columns, float *out);

// For each row, float32 (count, 4): the max, the log of the sum of exp(x - max), the entropy of the
// softmax in nats, and the first index of the max, exact below 2^24. NaN for rows of -inf only.
TOAST_API int toast_distribution(const toast_vectors *x, int64_t columns, float *out);

// Argmax of each row, uint32 (count); the first of equals. NaN is ignored; 0 if there is nothing
// else. 1 <= columns < 2^32.
TOAST_API int toast_largest(const toast_vectors *x, int64_t columns, uint32_t *out);

// Argpartition of each row, uint32 (count, columns): the index at `kth` is where a sort would put
// it, those before it are of elements no larger, those after it no smaller. Ties (zeros of either
// sign are equal) go by index; NaN sorts last. columns < 2^32.
TOAST_API int toast_partition(const toast_vectors *x, int64_t columns, int64_t kth, uint32_t *out);

// Quantises to rows of TOAST_I8, (count, columns + 4) bytes, columns >= 1: scale = max(|x|) / 127.
// Clamps to +-3e38; a NaN makes the row NaN.
TOAST_API int toast_quantise(const toast_vectors *x, int64_t columns, void *out);

// Dequantises rows of TOAST_I8 to float32 (count, columns).
TOAST_API int toast_dequantise(const void *rows, int64_t count, int64_t columns, float *out);

// How a router picks experts from logits: the largest softmax probabilities, in the order in which
// toast_partition leaves them at the end of a row. how: flags or 0:
//   NORMED: weights are divided by their sum (added up in that order) + eps;
//   AHEAD: in the order in which it leaves the negated probabilities at the beginning;
//   CHOSEN: weights are the softmax over the chosen logits only (x is float32);
//   SCORED: the sigmoid of each logit in place of the softmax;
//   SPARSE: alone, without groups and bias (SparseMixer, arXiv 2310.00811; x is float32): the
//     expert of the largest logit that is left, one after another, weighted by the softmax over
//     those left of which no logit is further below it than eps times the larger magnitude.
// groups: expert groups, adjacent; all but the `kept` best count as 0. A group's score is the sum
// of its two largest; with BEST its largest, before any bias, and the weights of the others are 0
// too. 0: no groups.
enum {
  TOAST_NORMED = 1, TOAST_AHEAD = 2, TOAST_CHOSEN = 4, TOAST_SCORED = 8, TOAST_BEST = 16,
  TOAST_SPARSE = 32
};
typedef struct {
  int32_t chosen, how, groups, kept;
  float eps, factor;  // factor multiplies weights, except with CHOSEN
} toast_choice;

// which, shares: chosen experts and their weights, (count, chosen). bias: (columns), added for
// choosing but not to weights; or NULL.
TOAST_API int toast_route(const toast_vectors *x, int64_t columns, const toast_choice *choice,
                          const float *bias, uint32_t *which, float *shares);

// Sums of each `group` vectors, each times its weight, in order. weights: float32 (x->count); out:
// (x->count / group, columns).
TOAST_API int toast_weighted_sums(const toast_vectors *x, int64_t columns, int64_t group,
                                  const float *weights, void *out, int32_t out_type);

// The same, plus sigmoid(gate) * more (a shared expert). more, out: float32 (x->count / group,
// columns); gates: (x->count / group).
TOAST_API int toast_blend(const toast_vectors *x, int64_t columns, int64_t group,
                          const float *weights, const float *more, const float *gates, float *out);

// Writes x to a KV cache, out (batch, heads, positions, size), from position `first` on.
// out_strides: of the first three axes, in elements (TOAST_I8: bytes). float16 saturates; TOAST_I8:
// as toast_quantise. size 0 writes nothing.
TOAST_API int toast_append(const toast_heads *x, int64_t positions, int64_t first, void *out,
                           const int64_t *out_strides, int32_t out_type);

// Causal depthwise convolution: out[t][c] = bias[c] + weight[c][0] x[t - kernel + 1][c] + ... +
// weight[c][kernel - 1] x[t][c], in this order; then SiLU if `silu`. The same bits in any chunking.
typedef struct {
  int64_t batch, length, channels, kernel;  // kernel <= 16
  const void *x;                            // (batch, length, channels), channels contiguous
  int64_t strides[2];                       // of batch and position, in elements
  const void *before;  // (batch, kernel - 1, channels): previous positions; NULL for zeros
  int64_t before_strides[2];
  int32_t type;               // of x and before
  const void *weight, *bias;  // (channels, kernel); (channels), NULL for zeros
  int32_t weight_type, silu;
  int64_t out_step;  // elements of out per position
} toast_convolution;

TOAST_API int toast_convolve(const toast_convolution *convolution, void *out, int32_t out_type);

}  // extern "C"

namespace toast {

struct Norm {
  const toast_vectors *x;
  int64_t columns;
  const void *weight;
  int32_t weight_type;
  float plus, eps;
  void *out;
  int32_t out_type;
  bool centred;
  const void *bias;
};

struct Gate {
  const void *gate, *x;
  int32_t type, activation;
  void *out;
};

struct WeightedSum {
  const toast_vectors *x;
  int64_t columns, group;
  const float *weights;
  void *out;
  int32_t out_type;
};

// Of part of a row, with d = x - max: the max, the sum of exp(d), and the sum of d * exp(d).
struct Exponentials {
  float max, sum, weighted;
};
constexpr float MIN_EXPONENT = -200;  // bound of d: exp(d) is 0 there, and d * exp(d) is 0, not NaN

constexpr int MAX_KERNEL = 16, CHANNEL_BLOCK = 128;

// The row kernels of one instruction set.
struct RowInstructions {
  void (*norm)(const Norm &, int64_t row);
  // cos and sin, (dims), at a position: signs and `factor` applied, so that an element becomes x *
  // cos + partner * sin.
  void (*rotation_table)(const toast_rotation &, float position, float *cos, float *sin);
  // Rotates one head, (size), from offset `from` of x to offset `to` of out.
  void (*rotate)(const toast_heads &, const toast_rotation &, const float *cos, const float *sin,
                 int64_t from, int64_t to, void *out);
  void (*gate)(const Gate &, int64_t first, int64_t end);
  // max: the largest, -inf if all are NaN. find: the first index of a number, or -1.
  float (*max)(int type, const void *x, int64_t first, int64_t count);
  int64_t (*find)(int type, const void *x, int64_t first, int64_t count, float number);
  Exponentials (*exponentials)(int type, const void *x, int64_t first, int64_t count);
  // exp(x - max) / sum, from offset `first` of x to offset `to` of out.
  void (*softmax)(int type, const void *x, int64_t first, int64_t count, Exponentials sums,
                  void *out, int out_type, int64_t to);
  void (*weighted_sum)(const WeightedSum &, int64_t row);
  // store: `count` elements from offset `from` of x to offset `to` of out, rounded; TOAST_I8 with
  // its scale. dequantise: the reverse.
  void (*store)(int type, const void *x, int64_t from, int64_t count, void *out, int out_type,
                int64_t to);
  void (*dequantise)(const void *row, int64_t count, float *out);
  // Channels of one batch, CHANNEL_BLOCK at most.
  void (*convolve)(const toast_convolution &, int64_t batch, int64_t first, int64_t end, void *out,
                   int out_type);
  RecurrentCode recurrent;
};

}  // namespace toast
