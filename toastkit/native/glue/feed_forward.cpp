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

// parts: the arrays of each, NULL for those absent. choice: experts of each vector, or NULL.
mx::array feed_forward(const mx::array &x, const mx::array *const (*parts)[GIVEN],
                       const mx::array *choice, const Network &network) {
  const int last = network.count - 1;
  check(x.ndim() >= 1, "no vectors");
  check(last == 2 || network.alone || !choice, "other parts");
  type_of(x);
  Arrays inputs = {x};
  const mx::array &gate = *parts[0][0], &down = *parts[last][0];
  const bool wide = add_network(inputs, parts, network, x.shape(-1));
  const auto dtype = wide ? mx::float32 : x.dtype();
  for (int i = 1; choice && i <= last; i++)
    check(gate.shape(0) == parts[i][0]->shape(0), "stacks of other sizes");
  check(!network.biased[last] || dtype == mx::float32, "a bias in 16 bits");
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
  shape.back() = down.shape(-2);
  return lazy("ToastFeedForward", std::move(shape), dtype, std::move(inputs),
              [network](const Arrays &arrays) { compute(network, arrays); }, nullptr, weights);
}

}  // namespace

Network network_of(const toast_operands &given, int first, int count, bool stacks, int activation,
                   const mx::array *(*parts)[GIVEN]) {
  const bool alone = activation & ALONE;
  check(count == 2 || (count == PARTS && !alone), "other parts");
  Network network = {count, alone, {}, {}, activation & ~ALONE, given.activation_bits};
  for (int i = 0; i < count; i++)
    network.parts[i] = part_of(given, first + i, network.biased[i], parts[i], stacks);
  return network;
}

bool add_network(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Network &network,
                 int64_t columns) {
  const int last = network.count - 1;
  check(last == 1 || last == 2, "other parts");
  const mx::array &gate = *parts[0][0];
  const int each = last == 2 || network.alone ? 1 : 2;
  bool wide = false;
  for (int i = 0; i <= last; i++) {
    const int64_t hidden = i == last ? gate.shape(-2) / each : columns;
    wide |= add_part(inputs, parts[i], network.parts[i], hidden) != inputs[0].dtype();
    check(i == last || parts[i][0]->shape(-2) == gate.shape(-2), "a gate of another shape");
  }
  check(gate.shape(-2) % each == 0, "no two halves");
  return wide;
}

FeedForward::FeedForward(const Network &network, const Arrays &arrays, size_t &at,
                         const Vectors &vectors)
    : network_(network),
      vectors_(vectors),
      gate_(arrays, at, network.parts[0], network.biased[0]),
      up_(network.count == 2
              ? nullptr
              : std::make_unique<Part>(arrays, at, network.parts[1], network.biased[1])),
      down_(arrays, at, network.parts[network.count - 1], network.biased[network.count - 1]),
      hidden_(gate_.matrix->rows / (up_ || network.alone ? 1 : 2)),
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
    const mx::array *parts[toast::PARTS][toast::GIVEN];
    const toast::Network network =
        toast::network_of(*given, 0, count, choice, activation, parts);
    return toast::feed_forward(array_of(x), parts, array_if(choice), network);
  });
}

}  // extern "C"
