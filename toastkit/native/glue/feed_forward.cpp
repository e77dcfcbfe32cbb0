// A feed-forward network as one MLX primitive: down(activation(gate(x)) * up(x)), equal to the
// single float32 operations to the bit.
#include "../kernels/rows.h"
#include "feed_forward.h"

namespace toast {
namespace {

// Of vectors (n, columns), each with the experts chosen for it if the parts are stacks.
void compute(const Network &network, const Arrays &arrays) {
  const mx::array &x = arrays[0], &choice = arrays[arrays.size() - 2];
  const bool chosen = network.parts[0].stack;
  mx::array out = arrays.back();
  Contiguous rows(x), experts(chosen ? choice : x);
  const int64_t columns = x.shape(-1), count = out.size() / out.shape(-1);
  const uint32_t *expert = chosen ? reinterpret_cast<const uint32_t *>(experts.data()) : nullptr;
  std::vector<uint32_t> vector(chosen ? count : 0);
  for (int64_t i = 0; chosen && i < count; i++) vector[i] = uint32_t(i / choice.shape(-1));
  const Vectors vectors = {{rows.data(), int64_t(x.size()) / columns, columns, type_of(x)}, count,
                           chosen ? vector.data() : nullptr, expert};
  size_t at = 1;
  feed(network, arrays, at, vectors, out.data<char>(), type_of(out));
}

// choice: experts of each vector, or NULL.
mx::array feed_forward(const mx::array &x, const toast_operands &given, int count,
                       const mx::array *choice, int activation) {
  check(x.ndim() >= 1, "no vectors");
  type_of(x);
  Arrays inputs = {x};
  const Network network =
      add_network(inputs, given, 0, count, x.shape(-1), activation, choice != nullptr);
  check(count == PARTS || network.alone || !choice, "other parts");
  const auto dtype = network.wide ? mx::float32 : x.dtype();
  check(!network.parts[count - 1].biased || dtype == mx::float32, "a bias in 16 bits");
  const Weights weights = {1, inputs.size()};
  auto shape = x.shape();
  if (choice) {
    auto each = choice->shape();
    check(choice->dtype() == mx::uint32 && choice->ndim() == x.ndim(), "other experts");
    shape.back() = each.back();
    check(shape == each, "experts that are chosen for other vectors");
    shape.push_back(0);
    inputs.push_back(*choice);
  }
  shape.back() = network.rows;
  return lazy("ToastFeedForward", std::move(shape), dtype, std::move(inputs),
              [network](const Arrays &arrays) { compute(network, arrays); }, nullptr, weights);
}

}  // namespace

Network add_network(Arrays &inputs, const toast_operands &given, int first, int count,
                    int64_t columns, int activation, bool stacks) {
  const bool alone = activation & ALONE;
  check(count == 2 || (count == PARTS && !alone), "other parts");
  Network network = {count, alone, activation & ~ALONE, given.activation_bits};
  const mx::array &gate = *part_of(given, first).weight;
  const int each = count == PARTS || alone ? 1 : 2;
  for (int i = 0; i < count; i++) {
    const bool last = i == count - 1;
    const GivenPart part = part_of(given, first + i);
    network.parts[i] = add_part(inputs, part, last ? gate.shape(-2) / each : columns, stacks);
    network.wide |= network.parts[i].wide;
    network.rows = part.weight->shape(-2);
    check(last || network.rows == gate.shape(-2), "a gate of another shape");
    check(!stacks || part.weight->shape(0) == gate.shape(0), "stacks of other sizes");
  }
  network.experts = gate.shape(0);
  check(gate.shape(-2) % each == 0, "no two halves");
  return network;
}

FeedForward::FeedForward(const Network &network, const Arrays &arrays, size_t &at,
                         const Vectors &vectors)
    : network_(network),
      vectors_(vectors),
      gate_(arrays, at, network.parts[0]),
      up_(network.count == 2 ? nullptr : std::make_unique<Part>(arrays, at, network.parts[1])),
      down_(arrays, at, network.parts[network.count - 1]),
      hidden_(gate_.matrix.rows / (up_ || network.alone ? 1 : 2)),
      gates_(new float[vectors.count * hidden_]),
      ups_(network.alone ? nullptr : new float[vectors.count * hidden_]),
      inner_{{gates_.get(), vectors.count, hidden_, TOAST_F32},
             vectors.count,
             nullptr,
             vectors.expert} {}

void FeedForward::add_first_products(std::vector<Result> &results) const {
  results.push_back({vectors_, gate_, gates_.get(), TOAST_F32, 0, hidden_});
  if (network_.alone) return;
  results.push_back(
      {vectors_, up_ ? *up_ : gate_, ups_.get(), TOAST_F32, up_ ? 0 : hidden_, hidden_});
}

Result FeedForward::last_product(void *out, int out_type) {
  need(toast_gate(gates_.get(), ups_.get(), vectors_.count * hidden_, TOAST_F32,
                  network_.activation, gates_.get()));
  return {inner_, down_, out, out_type};
}

void feed(const Network &network, const Arrays &arrays, size_t &at, const Vectors &vectors,
          void *out, int out_type) {
  FeedForward feeding(network, arrays, at, vectors);
  std::vector<Result> results;
  feeding.add_first_products(results);
  multiply(network.activation_bits, results);
  multiply(network.activation_bits, {feeding.last_product(out, out_type)});
}

}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to the output of a network of `count` parts. Lazy. choice: or
// NULL. Returns an error message or NULL.
TOAST_API const char *toast_feed_forward_array(void *out, void *x, const toast_operands *given,
                                               int count, void *choice, int activation) {
  return set_array(out, [&] {
    return toast::feed_forward(array_of(x), *given, count, array_if(choice), activation);
  });
}

}  // extern "C"
