// A mixture of experts, wherever it is a part of a primitive.
#pragma once

#include "feed_forward.h"

extern "C" {

// One as Python gives it. parts: the router; gate, up and down of the experts; `shared` parts of
// what all vectors go through, and its gate, or neither. chosen: experts of a vector; how: as
// toast_route has it. activations: of the experts, and of what all vectors go through.
typedef struct {
  const toast_operands *given;
  int32_t chosen, how, shared, activations[2];
} toast_mixture;

}  // extern "C"

namespace toast {

constexpr int MIXED = 2 * PARTS + 2;  // parts: the router; experts; what all vectors go through,
                                      // and its gate
struct Mixture {
  Packing router, gate;
  bool router_biased, gate_biased;
  Network experts, shared;  // shared: of no parts where there is none
  int chosen, how;
  int activation_bits;
};

// One as Python gives it, whose arrays become `parts`.
Mixture mixture_of(const toast_mixture &is, const mx::array *(*parts)[GIVEN]);

// The arrays of its parts, for float32 vectors of so many columns, which are the first of inputs,
// added to these. It gives vectors of as many. Raises as add_matrix.
void add_mixture(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Mixture &mixture,
                 int64_t columns);

// What it gives of x (count, columns), with the arrays of its parts from `at` on, which becomes
// where they end. out: (count, columns); may lie where x does.
void mix(const Mixture &mixture, const Arrays &arrays, size_t &at, const float *x, int64_t count,
         int64_t columns, float *out);

}  // namespace toast
