// A feed-forward network, wherever it is a part of a primitive.
#pragma once

#include "matrices.h"

namespace toast {

constexpr int PARTS = 3;  // gate, up, down; or gate and up in one, and down

struct Network {
  int count;  // of parts
  Packing parts[PARTS];
  bool biased[PARTS];
  int activation;
  bool exact;
};

// One as Python gives it: GIVEN arrays of each of `count` parts, which become `parts`, NULL for
// those that it has not; bits and group size of each.
Network network_of(void *const *objects, const int *packing, int count, bool stacks, int activation,
                   bool exact, const mx::array *(*parts)[GIVEN]);

// The arrays of its parts, for vectors of so many columns, added to `inputs`, of which the first
// are these. Whether numbers of a part have another dtype than that. Raises as add_matrix.
bool add_network(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Network &network,
                 int64_t columns);

// What it gives, (count, rows of down), with the arrays of its parts from `at` on, which becomes
// where they end. which, expert: of stacks, the vectors and their experts, `count` each; else NULL,
// and all vectors.
void feed(const Network &network, const Arrays &arrays, size_t &at, const toast_vectors &x,
          int64_t count, const uint32_t *which, const uint32_t *expert, void *out, int out_type);

}  // namespace toast
