// A feed-forward network as one MLX primitive: down(activation(gate(x)) * up(x)), by the kernels
// of products and gates, to the bit what these give one after another in float32.
#include "../kernels/rows.h"
#include "matrices.h"

namespace toast {
namespace {

constexpr int PARTS = 3;  // gate, up, down

struct Network {
  Packing parts[PARTS];
  int activation;
  bool exact;
};

// Of vectors (n, columns); or of each of them with those experts of stacks that are chosen for it.
void compute(const Network &network, const Arrays &arrays) {
  const mx::array &x = arrays[0];
  const auto &packing = network.parts;
  const bool chosen = packing[0].stack, exact = network.exact;
  mx::array out = arrays.back();
  size_t at = 1;
  const Matrix gate(arrays, at, packing[0]);
  const Matrix up(arrays, at += Matrix::count(packing[0]), packing[1]);
  const Matrix down(arrays, at += Matrix::count(packing[1]), packing[2]);
  const mx::array &choice = arrays[arrays.size() - 2];
  InOrder rows(x), experts(chosen ? choice : x);
  const int64_t columns = gate->columns, hidden = gate->rows, count = out.size() / down->rows;
  const uint32_t *expert = chosen ? reinterpret_cast<const uint32_t *>(experts.data()) : nullptr;
  std::vector<uint32_t> vector(chosen ? count : 0);
  for (int64_t i = 0; chosen && i < count; i++) vector[i] = uint32_t(i / choice.shape(-1));
  const toast_vectors vectors = {rows.data(), int64_t(x.size()) / columns, columns, type_of(x)};
  std::unique_ptr<float[]> gates(new float[count * hidden]), ups(new float[count * hidden]);
  const uint32_t *which = chosen ? vector.data() : nullptr;
  need(toast_multiply(gate.get(), &vectors, count, which, expert, exact, gates.get(), TOAST_F32));
  need(toast_multiply(up.get(), &vectors, count, which, expert, exact, ups.get(), TOAST_F32));
  need(toast_gate(gates.get(), ups.get(), count * hidden, TOAST_F32, network.activation,
                  gates.get()));
  const toast_vectors inner = {gates.get(), count, hidden, TOAST_F32};
  need(toast_multiply(down.get(), &inner, count, nullptr, expert, exact, out.data<char>(),
                      type_of(out)));
}

// parts: weight, scales and biases of each; the latter NULL where it is not packed.
mx::array feed_forward(const mx::array &x, const mx::array *const (*parts)[3],
                       const mx::array *choice, const Network &network) {
  check(x.ndim() >= 1, "no vectors");
  type_of(x);
  Arrays inputs = {x};
  auto dtype = x.dtype();
  int64_t columns = x.shape(-1);
  for (int i = 0; i < PARTS; i++) {
    const auto [weight, scales, biases] = parts[i];
    if (i == 2) columns = parts[0][0]->shape(-2);
    auto numbers = add_matrix(inputs, *weight, scales, biases, network.parts[i], columns);
    if (numbers != x.dtype()) dtype = mx::float32;
  }
  const mx::array &gate = *parts[0][0], &up = *parts[1][0], &down = *parts[2][0];
  check(gate.shape(-2) == up.shape(-2), "a gate of another shape");
  auto shape = x.shape();
  if (choice) {
    check(gate.shape(0) == up.shape(0) && gate.shape(0) == down.shape(0), "stacks of other sizes");
    auto each = choice->shape();
    check(choice->dtype() == mx::uint32 && choice->ndim() == x.ndim(), "other experts");
    shape.back() = each.back();
    check(shape == each, "experts that are chosen for other vectors");
    shape.push_back(0);
    inputs.push_back(*choice);
  }
  shape.back() = down.shape(-2);
  return made("ToastFeedForward", std::move(shape), dtype, std::move(inputs),
              [network](const Arrays &arrays) { compute(network, arrays); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, what a network gives. Lazy. arrays: weight, scales
// and biases of gate, up and down. packing: bits and group size of each. choice: NULL, or experts.
// Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_feed_forward_array(void *out, void *x, void **arrays,
                                               const int *packing, void *choice, int activation,
                                               int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    const mx::array *parts[toast::PARTS][3];
    toast::Network network = {{}, activation, exact != 0};
    for (int i = 0; i < toast::PARTS; i++) {
      network.parts[i] = {packing[2 * i], packing[2 * i + 1], choice != nullptr};
      for (int j = 0; j < 3; j++)
        parts[i][j] = arrays[3 * i + j] ? &array_of(arrays[3 * i + j]) : nullptr;
    }
    array_of(out) = toast::feed_forward(array_of(x), parts,
                                        choice ? &array_of(choice) : nullptr, network);
  });
}

}  // extern "C"
