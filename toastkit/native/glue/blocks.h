// Decoder layers of the common form as parts of primitives: the input norm and projections before
// attention; output projection, residuals and feed-forward network after it.
#pragma once

#include "../kernels/rows.h"
#include "feed_forward.h"

extern "C" {

// The constants of a layer.
//   heads, key_heads: of queries; of keys and values.
//   gated: the attention output is multiplied by sigmoids of gates, one for each of its numbers: 1,
//     gates are projected with the queries, behind those of each head; 2, by a part of their own.
//   norm_after_rope: queries and keys are normed per head after RoPE instead of before it.
//   fused_head: head size if one part projects queries, keys and values, in that order; else 0.
//   grouped: in that order for each head of keys, behind the queries that attend to it.
//   shares_cache: attends to the KV cache of an earlier layer; has no parts for keys and values.
//   layer_input: size of the per-layer input of each position (Gemma 4), or 0. The layer adds
//     norm(projection(activation(gate(out)) * input)) to its output.
//   network: number of its parts. activation: of the network, see feed_forward.h.
//   latent, nope, query_rank, expanded: of latent attention, see latent.h; latent is 0 for others.
//   layer_norms: the two input norms are layer norms (arXiv 1607.06450) instead of RMS norms.
//   parallel: attention and network both read norms of x: out = attention + network + x.
//   eps: of each norm. plus: added to the weights of RMS norms. multiplier: of what attention and
//     network add to the residual stream.
//   dims ... factor: of RoPE, see toast_rotation. scale, cap: of attention.
//
// Parts: queries, keys, values, out, the network's; then gate and projection of the per-layer
// input, or those of latent attention, or the gates'. Other arrays, NULL where absent: weights of
// the norms below, where those of queries, keys and values are of one head or of all heads of a
// position, as their length says; RoPE frequencies; sinks; a factor of the layer's output, float32
// (1,); biases of the two layer norms.
typedef struct {
  int32_t heads, key_heads, gated, norm_after_rope, fused_head, shares_cache, layer_input, network,
      activation;
  int32_t latent, nope, query_rank, expanded, layer_norms, parallel, grouped;
  float eps[8], plus, multiplier;
  int32_t dims, traditional, inverse;
  float rotation_scale, factor, scale, cap;
} toast_layer;

}  // extern "C"

namespace toast {

constexpr int HEADS = 3;  // parts that project queries, keys and values
// Indices of toast_operands.rest.
enum {
  FIRST_NORM, SECOND_NORM, QUERY_NORM, KEY_NORM, VALUE_NORM, ATTENDED_NORM, FED_NORM, INPUT_NORM,
  NORMS,
};
enum { FREQUENCIES = NORMS, SINKS, FACTOR, NORM_BIASES };
// Indices of parts after queries, keys and values, in Layer.
enum { OUT = HEADS, INPUT_GATE, INPUT_PROJECTION, QUERY_DOWN, UNEMBED, GATES, LAYER_PARTS };

// A layer and how its arrays are stored. size: of a head of queries, of keys, of values in
// attention. value: size of a head of values that latent attention projects afterwards; else 0.
struct Layer {
  toast_layer is;
  int activation_bits = 0;
  Packing packing[LAYER_PARTS] = {};
  Network network = {};
  int size[HEADS] = {}, value = 0;
  bool has[NORMS] = {}, biased_norms[2] = {}, scaled = false;  // scaled: by a factor
};

// Throws std::invalid_argument unless x is float32 (B, L, columns).
void check_hidden_states(const mx::array &x);

// Appends the weight and bias of norm i, if it has them. length, other: lengths the weight may
// have.
void add_norm(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int64_t length,
              int64_t other);

// Appends part `place` of `given` as part i of the layer; returns its rows. stack: its number of
// matrices, 0 for a single one. Throws as add_part.
int add_layer_part(Arrays &inputs, Layer &layer, int i, const toast_operands &given, int place,
                   int64_t columns, int stack = 0);

// Applies norm i, whose arrays begin at `at`, to rows as long as its weight; out may be x. numbers:
// of all rows. stride: floats from one row to the next; 0 for contiguous rows.
void apply_norm(const Layer &layer, int i, const Arrays &arrays, size_t &at, const float *x,
                int64_t numbers, float *out, int64_t stride = 0);

// x = m norm_i(x) + y, (count, columns) each; without norm i, m x + y. m: the multiplier.
void add_residual(const Layer &layer, int i, const Arrays &arrays, size_t &at, float *x,
                  const float *y, int64_t count, int64_t columns);

// Appends the RoPE frequencies. size: of a head. Throws std::invalid_argument if they do not fit.
void add_rotation(Arrays &inputs, const Layer &layer, const toast_operands &given, int size);

// The RoPE of a layer. positions: of the first token in each of `rows` rows of the batch.
toast_rotation rotation_of(const toast_layer &is, const float *frequencies,
                           const int32_t *positions, int64_t rows);

// Append the arrays of project_heads and of finish_layer to `inputs`, of which the first is x (B,
// L, columns). attended: size of the attention output of a position. Throw as add_part.
void add_head_projections(Arrays &inputs, Layer &layer, const toast_operands &given);
void add_finish(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended);

// Norm and projections of x (count, columns): queries, keys and values, (count, heads, size) each,
// or queries alone; and gates, shaped as queries. at: index of the first array; advanced past the
// last, except norms that come after RoPE.
void project_heads(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                   int64_t count, float *const (&outs)[HEADS], float *gates = nullptr);

// Norms of queries, keys and values, (count, heads, size) each, in place. at: as above.
void norm_heads(const Layer &layer, const Arrays &arrays, size_t &at, int64_t count,
                float *const (&heads)[HEADS]);

// x += y, (count, columns) each, float32.
void add_vectors(float *x, const float *y, int64_t count, int64_t columns);

// The rest of a layer after attention, with m the multiplier:
//   sum = x + m norm(out_projection(attended))
//   out = m norm(network(norm(sum))) + sum, or norm(sum) without a network
// or, parallel, sum = out_projection(attended), out = sum + network(norm(x)) + x. All (count,
// columns) but attended; out may be x. own: per-layer input (count, layer_input) or NULL.
void finish_layer(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                  const float *attended, int64_t count, float *sum, float *out,
                  const float *own = nullptr);

// True for a layer that ends after the attention's residual: no network and no norm for one.
bool is_attention_only(const Layer &layer);

// Appends the per-layer input, float32 (B, L, layer_input), or nothing for NULL. Throws
// std::invalid_argument if it does not fit the layer.
void add_layer_input(Arrays &inputs, const Layer &layer, const mx::array *own);

}  // namespace toast
