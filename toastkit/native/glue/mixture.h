// A mixture of experts, wherever it is a part of a primitive.
#pragma once

#include "feed_forward.h"

extern "C" {

// One as Python gives it. objects: GIVEN arrays of each part, NULL for what it has not; packing:
// bits and group size of each: the router; gate, up and down of the experts; `shared` parts of what
// all vectors go through, and its gate, or neither. chosen: experts of a vector; how: as
// toast_route has it. activations: of the experts, and of what all vectors go through.
typedef struct {
  void *const *objects;
  const int *packing;
  int32_t chosen, how, activation_bits, shared, activations[2];
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
