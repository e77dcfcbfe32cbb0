// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) as a part of a
// primitive. In toast_layer: latent, the rank of the joint compression of keys and values
// (kv_lora_rank); nope, the numbers of a query or key head without RoPE (qk_nope_head_dim), which
// precede those with RoPE; the latter are shared by all key heads. query_rank: of the compression
// of queries (q_lora_rank), or 0.
//
// expanded: the cache holds keys and values of each head. Otherwise it holds the latent as keys,
// and the RoPE part of keys as values; the up-projection of keys is absorbed into the queries, and
// the attended latent is projected to values afterwards, each by a stack with a matrix per head.
//
// Parts in place of queries, keys and values: queries (from the compressed ones, if any); latent
// and RoPE part of keys; keys and values of each head, or the stack absorbed into queries. After
// the network's: compression of queries, if any; stack of values, unless expanded. The norms of
// queries and keys are of the compressed queries and of the latent.
#pragma once

#include "blocks.h"

namespace toast {

// Positions of x (batch, length, columns) for RoPE. positions: of the first token of each row;
// rows: their number, batch or 1.
struct RopePositions {
  int64_t batch, length;
  const int32_t *positions;
  int64_t rows;
};

// As add_head_projections, RoPE frequencies included; sets the head sizes of the layer.
void add_latent(Arrays &inputs, Layer &layer, const toast_operands &given);

// As project_heads, with RoPE applied: (count, heads, size) each. Unless expanded, queries are
// (absorbed, RoPE part), keys the latent, and values the RoPE part of keys.
void project_latent_heads(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                          const RopePositions &positions, float *const (&outs)[HEADS]);

// Size of a head of the attention output, before project_values.
int attended_size(const Layer &layer);

// Sizes of latent attention that is not expanded.
struct LatentHeads {
  int64_t heads, latent, rope;
  float scale;
};

// A row of a batch in caches of any strides: the first `length` positions are attended to.
struct LatentRow {
  const mx::array *latent, *keys;
  int64_t row, length;
};

// Attention of one query position of each row, not expanded. queries: (rows, heads, latent + RoPE
// part). attended: (rows, heads, latent).
void attend_to_latents(const LatentHeads &is, const float *queries,
                       const std::vector<LatentRow> &rows, float *attended);

// Appends the stack that projects the attended latent to values, if there is one.
void add_value_projection(Arrays &inputs, Layer &layer, const toast_operands &given);

// Values (count, heads, value) of the attended latent (count, heads, latent), in memory owned by
// `values`; `attended` itself if it is values already.
const float *project_values(const Layer &layer, const Arrays &arrays, size_t &at,
                            const float *attended, int64_t count, std::unique_ptr<float[]> &values);

}  // namespace toast
