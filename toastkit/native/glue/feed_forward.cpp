// A feed-forward network as one MLX primitive: down(activation(gate(x)) * up(x)), by the kernels
// of products and gates, to the bit what these give one after another in float32.
#include "../kernels/rows.h"
#include "matrices.h"

namespace toast {
namespace {

constexpr int PARTS = 3;  // gate, up, down; or gate and up in one, and down
constexpr int GIVEN = 4;  // arrays of each: weight, scales, biases of groups, bias

struct Network {
  int count;  // of parts
  Packing parts[PARTS];
  bool biased[PARTS];
  int activation;
  bool exact;
};

// A matrix with what is added to its products.
struct Part {
  Part(const Arrays &arrays, size_t &at, const Network &network, int index)
      : matrix(arrays, at, network.parts[index]) {
    at += Matrix::count(network.parts[index]);
    if (network.biased[index]) bias = std::make_unique<InOrder>(arrays[at++]);
  }
  // Products with vectors, from row `first` on; all its rows are `count` where there is a bias.
  void multiply(const toast_vectors &x, int64_t count, const uint32_t *vector,
                const uint32_t *expert, bool exact, void *out, int out_type, int64_t first,
                int64_t rows) const {
    toast_matrix some = *matrix.get();
    const int64_t packed = some.bits ? some.columns * some.bits / 8 : 0;
    const int64_t size = some.type == TOAST_F32 ? 4 : some.type == TOAST_E8M0 ? 1 : 2;
    auto from = [&](const void *p, int64_t row) {
      return static_cast<const void *>(static_cast<const char *>(p) + first * row);
    };
    some.weight = from(some.weight, packed ? packed : some.columns * size);
    if (packed) some.scales = from(some.scales, some.columns / some.group_size * size);
    if (some.biases) some.biases = from(some.biases, some.columns / some.group_size * size);
    some.rows = rows;
    need(toast_multiply(&some, &x, count, vector, expert, exact, out, out_type));
    if (!bias) return;
    const float *added = reinterpret_cast<const float *>(bias->data()) + first;
    need(toast_add_rows(static_cast<float *>(out), count, rows, added, some.experts, expert));
  }
  Matrix matrix;
  std::unique_ptr<InOrder> bias;
};

// Of vectors (n, columns); or of each of them with those experts of stacks that are chosen for it.
void compute(const Network &network, const Arrays &arrays) {
  const mx::array &x = arrays[0], &choice = arrays[arrays.size() - 2];
  const bool chosen = network.parts[0].stack, exact = network.exact, halves = network.count == 2;
  mx::array out = arrays.back();
  size_t at = 1;
  const Part gate(arrays, at, network, 0);
  std::unique_ptr<Part> own;
  if (!halves) own = std::make_unique<Part>(arrays, at, network, 1);
  const Part &up = halves ? gate : *own;
  const Part down(arrays, at, network, network.count - 1);
  InOrder rows(x), experts(chosen ? choice : x);
  const int64_t columns = gate.matrix->columns, hidden = gate.matrix->rows / (halves ? 2 : 1);
  const int64_t outer = down.matrix->rows, count = out.size() / outer;
  const uint32_t *expert = chosen ? reinterpret_cast<const uint32_t *>(experts.data()) : nullptr;
  std::vector<uint32_t> vector(chosen ? count : 0);
  for (int64_t i = 0; chosen && i < count; i++) vector[i] = uint32_t(i / choice.shape(-1));
  const toast_vectors vectors = {rows.data(), int64_t(x.size()) / columns, columns, type_of(x)};
  std::unique_ptr<float[]> gates(new float[count * hidden]), ups(new float[count * hidden]);
  const uint32_t *which = chosen ? vector.data() : nullptr;
  gate.multiply(vectors, count, which, expert, exact, gates.get(), TOAST_F32, 0, hidden);
  up.multiply(vectors, count, which, expert, exact, ups.get(), TOAST_F32, halves ? hidden : 0,
              hidden);
  need(toast_gate(gates.get(), ups.get(), count * hidden, TOAST_F32, network.activation,
                  gates.get()));
  const toast_vectors inner = {gates.get(), count, hidden, TOAST_F32};
  down.multiply(inner, count, nullptr, expert, exact, out.data<char>(), type_of(out), 0, outer);
}

// parts: the arrays of each; NULL for scales and biases where there are none, and for no bias.
mx::array feed_forward(const mx::array &x, const mx::array *const (*parts)[GIVEN],
                       const mx::array *choice, const Network &network) {
  const int last = network.count - 1;
  check(x.ndim() >= 1, "no vectors");
  check(last == 2 || (last == 1 && !choice), "other parts");
  type_of(x);
  Arrays inputs = {x};
  auto dtype = x.dtype();
  const mx::array &gate = *parts[0][0], &down = *parts[last][0];
  for (int i = 0; i <= last; i++) {
    const auto [weight, scales, biases, bias] = parts[i];
    const int64_t hidden = i == last ? gate.shape(-2) / (3 - last) : x.shape(-1);
    auto numbers = add_matrix(inputs, *weight, scales, biases, network.parts[i], hidden);
    if (numbers != x.dtype()) dtype = mx::float32;
    check(i == last || weight->shape(-2) == gate.shape(-2), "a gate of another shape");
    check(!choice || weight->shape(0) == gate.shape(0), "stacks of other sizes");
    if (!bias) continue;
    auto rows = weight->shape();
    rows.pop_back();
    check(bias->shape() == rows && bias->dtype() == mx::float32, "a bias of another shape");
    inputs.push_back(*bias);
  }
  check(last == 2 || gate.shape(-2) % 2 == 0, "no two halves");
  check(!network.biased[last] || dtype == mx::float32, "a bias in 16 bits");
  auto shape = x.shape();
  if (choice) {
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

// Makes `out`, an array that nobody else has, what a network gives. Lazy. arrays: GIVEN of each of
// `count` parts. packing: bits and group size of each. choice: NULL, or experts. Returns what is
// wrong; NULL where nothing is.
TOAST_API const char *toast_feed_forward_array(void *out, void *x, void **arrays,
                                               const int *packing, int count, void *choice,
                                               int activation, int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    toast::check(count == 2 || count == toast::PARTS, "other parts");
    const mx::array *parts[toast::PARTS][toast::GIVEN];
    toast::Network network = {count, {}, {}, activation, exact != 0};
    for (int i = 0; i < count; i++) {
      void **given = arrays + toast::GIVEN * i;
      network.parts[i] = {packing[2 * i], packing[2 * i + 1], choice != nullptr, given[2]};
      network.biased[i] = given[toast::GIVEN - 1];
      for (int j = 0; j < toast::GIVEN; j++)
        parts[i][j] = given[j] ? &array_of(given[j]) : nullptr;
    }
    array_of(out) = toast::feed_forward(array_of(x), parts,
                                        choice ? &array_of(choice) : nullptr, network);
  });
}

}  // extern "C"
