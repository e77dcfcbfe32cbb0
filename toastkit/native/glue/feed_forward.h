// A feed-forward network (MLP) as a part of a primitive.
#pragma once

#include "matrices.h"

namespace toast {

constexpr int PARTS = 3;   // gate, up, down; or fused gate-up, down; or, ungated, up and down
constexpr int ALONE = 64;  // flag in an activation: ungated, down(activation(up(x)))

struct Network {
  int count;  // of parts
  bool alone;
  int activation, activation_bits;
  Packing parts[PARTS] = {};
  int rows = 0, experts = 0;  // of the output; matrices of each part, if they are stacks
  bool wide = false;          // any part is, see Packing
};

// Appends the `count` parts of `given` from `first` on to `inputs`, of which the first is x with
// `columns` columns. activation: may have the flag ALONE. Throws as add_part.
Network add_network(Arrays &inputs, const toast_operands &given, int first, int count,
                    int64_t columns, int activation, bool stacks = false);

// A network while it computes, in two rounds of products, so that each round can be computed
// together with products of other networks. at: index of its first array; advanced past its last.
class FeedForward {
 public:
  FeedForward(const Network &network, const Arrays &arrays, size_t &at, const Vectors &vectors);
  // Round 1: appends gate(x) and up(x), ungated up(x) alone.
  void add_first_products(std::vector<Result> &results) const;
  // Round 2: down(activation(gate(x)) * up(x)), ungated down(activation(up(x))). out: (count, rows
  // of down).
  Result last_product(void *out, int out_type);

 private:
  const Network &network_;
  const Vectors &vectors_;
  Part gate_;
  std::unique_ptr<Part> up_;  // NULL for a fused gate-up, which is gate_
  Part down_;
  int64_t hidden_;
  std::unique_ptr<float[]> gates_, ups_;
  Vectors inner_;
};

// Computes the network: both rounds.
void feed(const Network &network, const Arrays &arrays, size_t &at, const Vectors &vectors,
          void *out, int out_type);

}  // namespace toast
