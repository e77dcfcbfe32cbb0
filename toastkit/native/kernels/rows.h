// What is done to numbers row by row, in float32 whatever their type; each row for itself, so that
// a batch gives what its rows give. The C interface is below, how it is shared out in rows.cpp.
#pragma once

#include "kernels.h"
#include "recurrent.h"

#ifdef __cplusplus
extern "C" {
#endif

// Numbers (batch, heads, length, size): strides of the first three axes, in numbers.
typedef struct {
  const void *data;
  int64_t batch, heads, length, size;
  int64_t strides[3];
  int32_t type;
} toast_heads;

// Rotations of pairs (rotary position embedding, arXiv 2104.09864): of the first `dims` numbers of
// a head, each with the one dims / 2 further on; traditional: with its neighbour. Pair i is turned
// by (offset + place in length) * scale * frequency radians, each product rounded to float32.
typedef struct {
  int64_t dims;
  const float *frequencies;  // (dims / 2) of the pairs
  int32_t inverse;           // what is there is 1 / frequency
  const int32_t *offsets;    // of each of the batch, or of all of it
  int64_t offset_count;      // batch, or 1
  float scale;
  float factor;  // that what is rotated is multiplied by
  int32_t traditional;
} toast_rotation;

// GELU by tanh and by erf; OAI: of gpt-oss, x no further than 7 from 0, and the gate no higher, is
// (x + 1) * gate * sigmoid(1.702 * gate). FINITE: the number itself, 0 for NaN, 1e4 for infinity
// and -1e4 for its opposite. RELU2: its square, or 0 below 0.
enum {
  TOAST_SILU = 0, TOAST_GELU = 1, TOAST_SIGMOID = 2, TOAST_ERF = 3, TOAST_OAI = 4, TOAST_FINITE = 5,
  TOAST_RELU2 = 6
};

// All return 0; 1 for types that are not known, 2 for no memory. What comes out is contiguous.

// x / sqrt(mean of its squares + eps) * (weight + plus), row by row (arXiv 1910.07467).
// weight: (columns), or NULL for zeros.
TOAST_API int toast_rms_norm(const toast_vectors *x, int64_t columns, const void *weight,
                             int32_t weight_type, float plus, float eps, void *out,
                             int32_t out_type);

// (x - its mean) / sqrt(variance + eps) * weight + bias, row by row (arXiv 1607.06450). weight and
// bias: (columns), of one type, or NULL for ones and zeros.
TOAST_API int toast_layer_norm(const toast_vectors *x, int64_t columns, const void *weight,
                               const void *bias, int32_t weight_type, float eps, void *out,
                               int32_t out_type);

// (batch, heads, length, size) of the type of x.
TOAST_API int toast_rotate(const toast_heads *x, const toast_rotation *rotation, void *out);

// activation(gate) * x, number by number (arXiv 2002.05202); x: NULL for ones. One type for all.
TOAST_API int toast_gate(const void *gate, const void *x, int64_t count, int32_t type,
                         int32_t activation, void *out);

// x += rows[which], vector by vector, float32: x (count, columns), rows (stack, columns).
// which: NULL for 0; what is not there adds nothing.
TOAST_API int toast_add_rows(float *x, int64_t count, int64_t columns, const float *rows,
                             int64_t stack, const uint32_t *which);

// exp(x) over its sum in the row, (count, columns); or the logarithm of that sum, float32 (count).
TOAST_API int toast_softmax(const toast_vectors *x, int64_t columns, void *out, int32_t out_type);
TOAST_API int toast_log_sum_exp(const toast_vectors *x, int64_t columns, float *out);

// Of the softmax of each row, float32 (count, 3): the largest number, the logarithm of the sum of
// exp of how far all lie from it, and the entropy in nats. Rows of -inf alone have NaN.
TOAST_API int toast_distribution(const toast_vectors *x, int64_t columns, float *out);

// The first place of the largest number of each row, uint32 (count). NaN counts for nothing; where
// a row has nothing else, the place is 0. A row has fewer than 2^32 numbers, and one at least.
TOAST_API int toast_largest(const toast_vectors *x, int64_t columns, uint32_t *out);

// The places of the numbers of each row, uint32 (count, columns), so that the one at `kth` is the
// one that sorting would put there, what comes before it is no larger, and what comes after it no
// smaller. Of equal numbers (zeros of either sign are) the one that comes first is the smaller;
// NaN is larger than all. A row has fewer than 2^32 numbers.
TOAST_API int toast_partition(const toast_vectors *x, int64_t columns, int64_t kth, uint32_t *out);

// Rows as TOAST_I8 has them, (count, columns + 4) bytes, of one column at least: the largest number
// of a row is 127 times its scale. What is beyond 3e38 counts as that; NaN makes the row NaN.
TOAST_API int toast_quantise(const toast_vectors *x, int64_t columns, void *out);

// What these stand for, float32 (count, columns).
TOAST_API int toast_dequantise(const void *rows, int64_t count, int64_t columns, float *out);

// How a router's logits choose experts: by the largest numbers of their softmax, as
// toast_partition leaves them at its end. how: of these, or 0. NORMED: the shares of those that are
// chosen are taken over their sum + eps, which is added up in that order. AHEAD: in the order in
// which the same leaves them at its beginning, of the numbers times -1. CHOSEN: of the largest
// logits, float32, the softmax, which adds up to 1. SCORED: by the sigmoid of each in place of the
// softmax.
// groups: of experts side by side, of which the `kept` best ones are chosen from, by the sum of
// their two largest numbers, and the others' are 0; with BEST by the largest, before there is a
// bias, and their shares are 0 too. No groups: of all.
enum { TOAST_NORMED = 1, TOAST_AHEAD = 2, TOAST_CHOSEN = 4, TOAST_SCORED = 8, TOAST_BEST = 16 };
typedef struct {
  int32_t chosen, how, groups, kept;
  float eps, factor;  // factor: of shares, unless they are the CHOSEN's
} toast_choice;

// Where these are, and their shares, (count, chosen) each. bias: (columns), that is added to what
// is chosen by, and not to shares; NULL for none.
TOAST_API int toast_route(const toast_vectors *x, int64_t columns, const toast_choice *choice,
                          const float *bias, uint32_t *which, float *shares);

// Of groups of so many vectors each, their sums, each vector times its weight, in their order.
// weights: float32 (x->count); out: (x->count / group, columns).
TOAST_API int toast_weighted_sums(const toast_vectors *x, int64_t columns, int64_t group,
                                  const float *weights, void *out, int32_t out_type);

// The same, and sigmoid(gate) times one more vector of each group added to it. more: float32
// (x->count / group, columns), gates: (x->count / group); out: as more.
TOAST_API int toast_blend(const toast_vectors *x, int64_t columns, int64_t group,
                          const float *weights, const float *more, const float *gates, float *out);

// Positions of a cache of keys or values: x, rounded to out_type, into out (batch, heads,
// positions, size) from `first` on; out_strides: of its first three axes, in numbers (bytes of
// TOAST_I8). What float16 cannot hold becomes its largest number. TOAST_I8: rows of toast_quantise;
// of no numbers, no bytes.
TOAST_API int toast_append(const toast_heads *x, int64_t positions, int64_t first, void *out,
                           const int64_t *out_strides, int32_t out_type);

// A causal convolution, channel by channel: out[t][c] = bias[c] + weight[c][0] x[t - kernel + 1][c]
// + ... + weight[c][kernel - 1] x[t][c], added one after another; then SiLU if `silu` says so. A
// position does not know of how many there are: what it gives is the same in any chunk.
typedef struct {
  int64_t batch, length, channels, kernel;  // kernel: 16 at most
  const void *x;                            // (batch, length, channels), channels side by side
  int64_t strides[2];  // numbers from one batch, and from one position, to the next
  const void *before;  // (batch, kernel - 1, channels): the positions before; NULL for zeros
  int64_t before_strides[2];
  int32_t type;               // of x and before
  const void *weight, *bias;  // (channels, kernel); (channels), or NULL for zeros
  int32_t weight_type, silu;
  int64_t out_step;  // numbers of out from one position to the next
} toast_convolution;

TOAST_API int toast_convolve(const toast_convolution *convolution, void *out, int32_t out_type);

#ifdef __cplusplus
}

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

// A part of a row of exp: its largest number, the sum of exp of what its numbers lie above it, and
// the sum of these, each times what its number lies above it.
struct Exponentials {
  float max, sum, weighted;
};
constexpr float MIN_EXPONENT = -200;  // from the largest: exp of it is 0, and times 0 it is 0

constexpr int MOST_KERNEL = 16, CHANNEL_BLOCK = 128;

// One instruction set's code.
struct RowInstructions {
  void (*norm)(const Norm &, int64_t row);
  // What each number (dims) is multiplied by at a position, and what its partner in the pair is.
  void (*rotation_table)(const toast_rotation &, float position, float *cos, float *sin);
  // One head, (size) at `from` of x, to `to` of out.
  void (*rotate)(const toast_heads &, const toast_rotation &, const float *cos, const float *sin,
                 int64_t from, int64_t to, void *out);
  void (*gate)(const Gate &, int64_t first, int64_t end);
  // The largest number; -inf where there is only NaN. The first place of a number, -1 for none.
  float (*max)(int type, const void *x, int64_t first, int64_t count);
  int64_t (*find)(int type, const void *x, int64_t first, int64_t count, float number);
  Exponentials (*exponentials)(int type, const void *x, int64_t first, int64_t count);
  // exp(x - most) * share, from `first` on of x to `to` on of out.
  void (*softmax)(int type, const void *x, int64_t first, int64_t count, Exponentials of, void *out,
                  int out_type, int64_t to);
  void (*weighted_sum)(const WeightedSum &, int64_t row);
  // (count) numbers at `from` of x, to `to` of out, of TOAST_I8 with their scale behind them;
  // numbers from such a row.
  void (*store)(int type, const void *x, int64_t from, int64_t count, void *out, int out_type,
                int64_t to);
  void (*dequantise)(const void *row, int64_t count, float *out);
  // Channels of one batch, CONVOLVED at most.
  void (*convolve)(const toast_convolution &, int64_t batch, int64_t first, int64_t end, void *out,
                   int out_type);
  RecurrentCode recurrent;
};

}  // namespace toast
#endif
