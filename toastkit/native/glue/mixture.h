// A mixture of experts (MoE) as a part of a primitive.
#pragma once

#include "../kernels/rows.h"
#include "blocks.h"

extern "C" {

// A mixture as Python passes it. Parts: the router, the experts' stacks, the `shared` parts of a
// shared expert (0: there is none) and, if `gated`, its gate. rest[0]: bias of the router's choice
// (not of its weights), or NULL. experts: number of stacks, 3 with gate, up and down, 2 with up and
// down. activations: of the experts, of the shared expert.
typedef struct {
  const toast_operands *given;
  toast_choice choice;
  int32_t experts, shared, gated, activations[2];
} toast_mixture;

}  // extern "C"

namespace toast {

struct Mixture {
  Packing router, gate;
  bool gated, choice_biased;
  Network experts, shared;  // shared.count: 0 without a shared expert
  toast_choice choice;
  int activation_bits;
};

// Throws std::invalid_argument for a routing that is impossible with so many experts. bias: or
// NULL.
void check_choice(const toast_choice &choice, const mx::array *bias, int experts);

// What follows attention, or what stands in its place: finish_layer, then the mixture that is the
// layer's network, if that has experts. outputs: 1; 2 if the network is computed elsewhere: the sum
// and its norm.
struct Ending {
  Mixture mixture = {};
  size_t outputs = 1;
};

// Appends its arrays. mixture: or NULL. attended: see add_finish. Throws as add_part.
Ending add_ending(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended,
                  const toast_mixture *mixture);

// Computes it. outs: index of the first output; the others are as for finish_layer.
void end_layer(const Layer &layer, const Ending &ending, const Arrays &arrays, size_t &at,
               const float *x, const float *attended, int64_t count, size_t outs,
               const float *own = nullptr);

}  // namespace toast
