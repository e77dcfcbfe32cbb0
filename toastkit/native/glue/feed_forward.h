// A feed-forward network, wherever it is a part of a primitive.
#pragma once

#include "matrices.h"

namespace toast {

constexpr int PARTS = 3;  // gate, up, down; or gate and up in one, and down; or up and down
constexpr int ALONE = 64;  // added to an activation: the last, which is of what up gives

struct Network {
  int count;  // of parts
  bool alone;
  Packing parts[PARTS];
  bool biased[PARTS];
  int activation;
  int activation_bits;
};

// One of `count` parts of those that are given, from `first` on; their arrays become `parts`.
// activation: and ALONE, if it is so.
Network network_of(const toast_operands &given, int first, int count, bool stacks, int activation,
                   const mx::array *(*parts)[GIVEN]);

// The arrays of its parts, for vectors of so many columns, added to `inputs`, of which the first
// are these. Whether numbers of a part have another dtype than that. Raises as add_matrix.
bool add_network(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Network &network,
                 int64_t columns);

// One at work, in two runs of products that may go together with others: those that `opens` names,
// and then what `closes` does. The arrays of its parts are those from `at` on, which becomes where
// they end.
class Feeding {
 public:
  Feeding(const Network &network, const Arrays &arrays, size_t &at, const Vectors &vectors);
  // gate(x) and up(x), or the one there is.
  void opens(std::vector<Result> &results) const;
  // down of activation(gate(x)) * up(x), or of activation(up(x)): out is (count, rows of down).
  Result closes(void *out, int out_type);

 private:
  const Network &network_;
  const Vectors &vectors_;
  Part gate_;
  std::unique_ptr<Part> up_;  // NULL where the gate has both
  Part down_;
  int64_t hidden_;
  std::unique_ptr<float[]> gates_, ups_;
  Vectors inner_;
};

// What a network gives, both runs.
void feed(const Network &network, const Arrays &arrays, size_t &at, const Vectors &vectors,
          void *out, int out_type);

}  // namespace toast
