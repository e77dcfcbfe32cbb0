// A mixture of experts, wherever it is a part of a primitive.
#pragma once

#include "feed_forward.h"

extern "C" {

// One as Python gives it where it is a part of a primitive: see mixture_of.
typedef struct {
  void *const *objects;
  const int *packing;
  int32_t chosen, how, exact, shared, activations[2];
} toast_mixture;

}  // extern "C"

namespace toast {

constexpr int MIXED = 2 * PARTS + 2;  // parts: the router; experts; what all vectors go through,
                                      // and its gate
struct Mixture {
  Packing router, gate;
  bool router_biased, gate_biased;
  Network experts, shared;  // shared: of no parts where there is none
  int chosen, how;          // experts of a vector; as toast_route has it
  bool exact;
};

// One as Python gives it: GIVEN arrays of each part, which become `parts`, and bits and group size
// of each. shared: its parts, 0 for none, which has no gate either.
Mixture mixture_of(void *const *objects, const int *packing, int shared, int chosen, int how,
                   const int (&activations)[2], bool exact, const mx::array *(*parts)[GIVEN]);

// The arrays of its parts, for float32 vectors of so many columns, which are the first of inputs,
// added to these. It gives vectors of as many. Raises as add_matrix.
void add_mixture(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Mixture &mixture,
                 int64_t columns);

// What it gives of x (count, columns), with the arrays of its parts from `at` on, which becomes
// where they end. out: (count, columns); may lie where x does.
void mix(const Mixture &mixture, const Arrays &arrays, size_t &at, const float *x, int64_t count,
         int64_t columns, float *out);

}  // namespace toast
