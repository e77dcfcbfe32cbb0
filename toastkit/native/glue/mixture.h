// A mixture of experts, wherever it is a part of a primitive.
#pragma once

#include "../kernels/rows.h"
#include "blocks.h"

extern "C" {

// One as Python gives it. Its operands: the router; gate, up and down of the experts; `shared`
// parts of what all vectors go through, if there is any, and its gate, if it is gated; and what is
// added to what is chosen by, NULL for nothing. experts: parts of these, gate, up and down, or up
// and down. activations: of the experts, and of what all vectors go through.
typedef struct {
  const toast_operands *given;
  toast_choice choice;
  int32_t experts, shared, gated, activations[2];
} toast_mixture;

}  // extern "C"

namespace toast {

constexpr int MIXED = 2 * PARTS + 3;  // parts: the router; experts; what all vectors go through,
                                      // and its gate; the choice's bias
struct Mixture {
  Packing router, gate;
  bool router_biased, gate_biased;
  bool gated, choice_biased;
  Network experts, shared;  // shared: of no parts where there is none
  toast_choice choice;
  int activation_bits;
};

// Raises std::invalid_argument for a choice among so many experts that cannot be. bias: NULL for
// none.
void check_choice(const toast_choice &choice, const mx::array *bias, int experts);

// One as Python gives it, whose arrays become `parts`, the last of which is the choice's bias.
Mixture mixture_of(const toast_mixture &is, const mx::array *(*parts)[GIVEN]);

// The arrays of its parts, for float32 vectors of so many columns, which are the first of inputs,
// added to these. It gives vectors of as many. Raises as add_matrix.
void add_mixture(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Mixture &mixture,
                 int64_t columns);

// What it gives of x (count, columns), with the arrays of its parts from `at` on, which becomes
// where they end. out: (count, columns); may lie where x does.
void mix(const Mixture &mixture, const Arrays &arrays, size_t &at, const float *x, int64_t count,
         int64_t columns, float *out);

// A mixture that is a layer's network, its arrays and its norm's added to `inputs`. Raises as
// add_matrix.
Mixture add_mixture_behind(Arrays &inputs, Layer &layer, const toast_operands &given,
                           const toast_mixture &is);

// out = m norm(mixture(out)) + sum, (count, columns) each, of what `behind` left. m: multiplier.
void mix_behind(const Layer &layer, const Mixture &mixture, const Arrays &arrays, size_t &at,
                const float *sum, int64_t count, float *out);

}  // namespace toast
