// Layers of the common form, wherever they are a part of a primitive: what lies before attention,
// and what behind.
#pragma once

#include "feed_forward.h"

extern "C" {

// What is the same whatever a layer is given. heads: of queries; of keys and values. network: its
// parts. gated: behind the numbers of each head of queries come as many, by whose sigmoid is
// multiplied what it attends to. late: queries and keys are normed, each head by itself, once they
// have been turned, and not before. joined: the numbers of a head, where queries, keys and values
// are rows of one part, these behind those; else 0. eps: of its norms, which add `plus` to their
// weights. multiplier: a factor of what attention and network give. dims ... factor: of the
// rotation, as toast_rotation has them; scale, cap: of attention.
//
// Its operands: queries, keys, values, out and the network's parts; the weights of the norms of
// what attention and network are given, of queries and of keys (of each head or of all heads of a
// position, as these are long), and of what attention and network give; frequencies; and sinks.
// NULL for what it has not.
typedef struct {
  int32_t heads, key_heads, gated, late, joined, network, activation;
  float eps[6], plus, multiplier;
  int32_t dims, traditional, inverse;
  float rotation_scale, factor, scale, cap;
} toast_layer;

}  // extern "C"

namespace toast {

constexpr int HEADS = 3;  // parts that give queries, keys and values
// What lies beside parts.
enum { FIRST_NORM, SECOND_NORM, QUERY_NORM, KEY_NORM, ATTENDED_NORM, FED_NORM, NORMS };
enum { FREQUENCIES = NORMS, SINKS };

// size: of a head of queries, of keys, of values.
struct Layer {
  toast_layer is;
  int activation_bits = 0;
  Packing packing[HEADS + 1] = {};  // of queries, keys, values; out
  bool biased[HEADS + 1] = {};
  Network network = {};
  int size[HEADS] = {};
  bool has[NORMS] = {};
};

// Raises std::invalid_argument unless x is (B, L, columns) float32.
void check_rows(const mx::array &x);

// The arrays of what lies before attention, or behind it, added to `inputs`, of which the first is
// x (B, L, columns): the weights of norms before those of parts. attended: numbers of a position.
// Raise as add_matrix.
void add_before(Arrays &inputs, Layer &layer, const toast_operands &given);
void add_behind(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended);

// Queries, keys and values of x (count, columns), (count, heads, size) each; and gates, as queries,
// where there are any. at: where the arrays begin, and then where they end.
void before(const Layer &layer, const Arrays &arrays, size_t &at, const float *x, int64_t count,
            float *const (&outs)[HEADS], float *gates = nullptr);

// The norms of queries and keys, (count, heads, size) or so, in place. at: as above.
void norm_heads(const Layer &layer, const Arrays &arrays, size_t &at, int64_t count,
                float *const (&heads)[2]);

// x += y, (count, columns) each, float32.
void add_vectors(float *x, const float *y, int64_t count, int64_t columns);

// sum = x + m norm(out(attended)), and m norm(network(norm(sum))) + sum; or norm(sum), where there
// is no network. m: multiplier. All (count, columns) but attended; out may lie where x does.
void behind(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
            const float *attended, int64_t count, float *sum, float *out);

}  // namespace toast
