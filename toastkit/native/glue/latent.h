// Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), wherever it is a part of a
// primitive. Keys and values of all heads come of `latent` numbers of a position. The numbers of a
// head of queries or keys are `still`, and then some that are turned, which all keys of a position
// have in common. narrow: queries come of so many numbers of a position, or 0 where of all.
//
// opened: what is kept are keys and values of each head. Or what is kept is the latent, and, in
// place of values, what is turned of keys; then queries go to it by a matrix for each head, and
// what they attend to, which is the latent too, becomes values by another.
//
// Its parts, where others have those of queries, keys and values: queries; the latent and behind it
// what is turned; keys and behind them values of each head, or the stack by which queries go. And
// behind those of the network: what queries come of, if that is narrow; and the stack by which
// values come, unless they are opened. Its norms of queries and keys are of what is narrow, and of
// the latent.
#pragma once

#include "blocks.h"

namespace toast {

// Where positions are turned: those of x (batch, length, columns), in each row of a batch from one
// of `positions` on, of which there are batch or one.
struct Turning {
  int64_t batch, length;
  const int32_t *positions;
  int64_t rows;
};

// As add_before, the frequencies included; sets the sizes of a layer.
void add_latent(Arrays &inputs, Layer &layer, const toast_operands &given);

// As `before`: (count, heads, size) each, those of queries and keys turned. Unless they are opened,
// queries are what goes to the latent and behind it what is turned, keys are the latent, and values
// what is turned of keys.
void latent_before(const Layer &layer, const Arrays &arrays, size_t &at, const float *x,
                   const Turning &turning, float *const (&outs)[HEADS]);

// Numbers that a head of what is attended to has.
int attended_size(const Layer &layer);

// Attends with queries of one position each, (batch, heads, latent and what is turned), which
// become others, to so many positions of caches that lie anyhow: (batch, heads, latent).
void attend_to_latent(const Layer &layer, float *queries, int64_t batch, const mx::array &latent,
                   const mx::array &keys, int64_t length, float *attended);

// The stack by which values come of what is attended to, added to `inputs`, unless it is values.
void add_values(Arrays &inputs, Layer &layer, const toast_operands &given);

// (count, heads, value), of (count, heads, latent); those given, where they are values. values:
// memory for them.
const float *values_of(const Layer &layer, const Arrays &arrays, size_t &at, const float *attended,
                       int64_t count, std::unique_ptr<float[]> &values);

}  // namespace toast
