// Layers of the common form, wherever they are a part of a primitive: what lies before attention,
// and what behind.
#pragma once

#include "../kernels/rows.h"
#include "feed_forward.h"

extern "C" {

// What is the same whatever a layer is given. heads: of queries; of keys and values. network: its
// parts. gated: by the sigmoids of as many numbers as heads of queries have is multiplied what they
// attend to: 1, those that come behind each head's, or 2, of a part of their own. late: queries and
// keys are normed, each head by itself, once they have been turned, and not before. joined: the
// numbers of a head, where queries, keys and values are rows of one part, these behind those; else
// 0. shares: it attends to what a layer before has kept, and its parts for keys and values are not
// looked at. own: numbers of an input of its own that each position has, or 0: to what its network
// gave is added a norm of a product of it, times what a gate makes of that sum. latent ... opened:
// see latent.h; latent is 0 for other attention. centred: the norms of what attention and network
// are given are layer norms (arXiv 1607.06450). parallel: the network is given a norm of x, as
// attention is, and what comes out is what attention gave + what it gave + x. eps: of its norms,
// which add `plus` to their weights. multiplier: a factor of what attention and network give. dims
// ... factor: of the rotation, as toast_rotation has them; scale, cap: of attention.
//
// Its operands: queries, keys, values, out, the network's parts, and the gate and the product of
// its own input, or what latent attention has besides, or gates; the weights of the norms of what
// attention and network are given, of queries, keys and values (of each head or of all heads of a
// position, as these are long), of what attention and network give, and of what its own input adds;
// frequencies; sinks; a factor of all that it gives, float32 (1,); and, of centred norms, what the
// first and the second add, of the types of their weights. NULL for what it has not.
typedef struct {
  int32_t heads, key_heads, gated, late, joined, shares, own, network, activation;
  int32_t latent, still, narrow, opened, centred, parallel;
  float eps[8], plus, multiplier;
  int32_t dims, traditional, inverse;
  float rotation_scale, factor, scale, cap;
} toast_layer;

}  // extern "C"

namespace toast {

constexpr int HEADS = 3;  // parts that give queries, keys and values
// What lies beside parts.
enum {
  FIRST_NORM, SECOND_NORM, QUERY_NORM, KEY_NORM, VALUE_NORM, ATTENDED_NORM, FED_NORM, OWN_NORM,
  NORMS,
};
enum { FREQUENCIES = NORMS, SINKS, FACTOR, NORM_BIASES };
// Besides queries, keys and values.
enum { OUT = HEADS, OWN_GATE, OWN_PRODUCT, NARROW, UNEMBED, GATES, OWN_PARTS };

// size: of a head of queries, of keys, of values, as attention takes them. value: of a head that
// comes out, where that is made of what is attended to; else 0.
struct Layer {
  toast_layer is;
  int activation_bits = 0;
  Packing packing[OWN_PARTS] = {};
  bool biased[OWN_PARTS] = {};
  Network network = {};
  int size[HEADS] = {}, value = 0;
  bool has[NORMS] = {}, biased_norms[2] = {}, scaled = false;  // scaled: by a factor
};

// Raises std::invalid_argument unless x is (B, L, columns) float32.
void check_rows(const mx::array &x);

// The weight of norm i, if there is one, of rows of either length, and what it adds, added to
// `inputs`.
void add_norm(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int64_t length,
              int64_t other);

// Part i, which is none of the network's, and that one of those given, or such a stack, added to
// `inputs`; its rows. Raise as add_matrix.
int add_one(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int place,
            int64_t columns, int stack = 0);

// Norm i of numbers in rows as long as its weight, which is the array at `at`; may be in place.
// stride: numbers from one row to the next, or 0 where they lie side by side.
void apply_norm(const Layer &layer, int i, const Arrays &arrays, size_t &at, const float *x,
                int64_t numbers, float *out, int64_t stride = 0);

// x = m norm i of x + y, or without a norm m x + y, (count, columns) each. m: multiplier.
void add_to(const Layer &layer, int i, const Arrays &arrays, size_t &at, float *x, const float *y,
            int64_t count, int64_t columns);

// Frequencies of its rotation, added to `inputs`. Raises std::invalid_argument for others.
void add_rotation(Arrays &inputs, const Layer &layer, const toast_operands &given, int size);

// That rotation, of positions that begin so in each of so many rows.
toast_rotation rotation_of(const toast_layer &is, const float *frequencies,
                           const int32_t *positions, int64_t rows);

// The arrays of what lies before attention, or behind it, added to `inputs`, of which the first is
// x (B, L, columns): the weights of norms before those of parts. attended: numbers of a position.
// Raise as add_matrix.
void add_before(Arrays &inputs, Layer &layer, const toast_operands &given);
void add_behind(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended);

// Queries, keys and values of x (count, columns), (count, heads, size) each, or queries alone; and
// gates, as queries, where there are any. at: where the arrays begin, and then where they end, or
// norms that are late begin.
void before(const Layer &layer, const Arrays &arrays, size_t &at, const float *x, int64_t count,
            float *const (&outs)[HEADS], float *gates = nullptr);

// The norms of queries, keys and values, (count, heads, size) or so, in place. at: as above.
void norm_heads(const Layer &layer, const Arrays &arrays, size_t &at, int64_t count,
                float *const (&heads)[HEADS]);

// x += y, (count, columns) each, float32.
void add_vectors(float *x, const float *y, int64_t count, int64_t columns);

// sum = x + m norm(out(attended)), and m norm(network(norm(sum))) + sum; or norm(sum), where there
// is no network; or, parallel, sum = out(attended), and sum + network(norm(x)) + x. m: multiplier.
// All (count, columns) but attended; out may lie where x does. own: (count, own), its own input;
// NULL for none.
void behind(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
            const float *attended, int64_t count, float *sum, float *out,
            const float *own = nullptr);

// Whether what attention gives, added to x, is all that a layer gives: there is no network, nor a
// norm for one.
bool is_all(const Layer &layer);

// The own input of x (B, L, columns), added to `inputs`: float32 (B, L, own); NULL where a layer
// has none, and nothing is added. Raises std::invalid_argument for another.
void add_own(Arrays &inputs, const Layer &layer, const mx::array *own);

}  // namespace toast
