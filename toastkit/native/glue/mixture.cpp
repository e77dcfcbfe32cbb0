// A mixture of experts as one MLX primitive: router, top-k choice, experts, weighted sum, and the
// gated shared expert; equal to the single operations to the bit.
#include "mixture.h"

namespace toast {
namespace {

// The mixture of x (..., columns).
mx::array mixed(const mx::array &x, const mx::array *const (*parts)[GIVEN],
                const Mixture &mixture) {
  check(x.ndim() >= 1 && x.dtype() == mx::float32, "vectors that are no float32");
  Arrays inputs = {x};
  add_mixture(inputs, parts, mixture, x.shape(-1));
  const Weights weights = {1, inputs.size()};
  return lazy("ToastMixture", x.shape(), mx::float32, std::move(inputs),
              [mixture](const Arrays &arrays) {
    mx::array out = arrays.back();
    Contiguous rows(arrays[0]);
    const int64_t columns = out.shape(-1);
    size_t at = 1;
    mix(mixture, arrays, at, rows.floats(),
        int64_t(out.size()) / columns, columns, out.data<float>());
  }, nullptr, weights);
}

}  // namespace

void check_choice(const toast_choice &choice, const mx::array *bias, int experts) {
  check(choice.chosen > 0 && choice.chosen <= experts, "too few experts");
  check(choice.groups <= 0 || (experts % choice.groups == 0 && choice.kept >= 0 &&
                               choice.kept <= choice.groups),
        "groups of other experts");
  check(!bias || (bias->dtype() == mx::float32 && bias->shape() == mx::Shape{experts}),
        "a bias of other experts");
}

Mixture mixture_of(const toast_mixture &is, const mx::array *(*parts)[GIVEN]) {
  Mixture m = {};
  m.choice = is.choice, m.activation_bits = is.given->activation_bits;
  auto some = [&](int i, int count, bool stacks, int activation) {
    return network_of(*is.given, i, count, stacks, activation, parts + i);
  };
  m.router = part_of(*is.given, 0, m.router_biased, parts[0]);
  m.experts = some(1, is.experts, true, is.activations[0]);
  check(m.experts.alone || is.experts == PARTS, "other experts");
  if (is.shared) {
    m.shared = some(1 + is.experts, is.shared, false, is.activations[1]);
    const int gate = 1 + is.experts + is.shared;
    if ((m.gated = is.gated)) m.gate = part_of(*is.given, gate, m.gate_biased, parts[gate]);
  }
  m.choice_biased = is.given->rest[0];
  parts[MIXED - 1][0] = m.choice_biased ? &rest_of(*is.given, 0) : nullptr;
  return m;
}

void add_mixture(Arrays &inputs, const mx::array *const (*parts)[GIVEN], const Mixture &m,
                 int64_t columns) {
  auto gives = [&](int i, int64_t rows) {
    check(parts[i][0]->shape(-2) == rows, "rows of another length");
  };
  add_part(inputs, parts[0], m.router, columns);
  const int experts = parts[0][0]->shape(-2);
  const mx::array *bias = parts[MIXED - 1][0];
  check_choice(m.choice, bias, experts);
  if (bias) inputs.push_back(*bias);
  const int last = m.experts.count, gate = 1 + last + m.shared.count;
  add_network(inputs, parts + 1, m.experts, columns);
  for (int i = 1; i <= last; i++)
    check(parts[i][0]->shape(0) == experts, "stacks of other sizes");
  gives(last, columns);
  if (!m.shared.count) return;
  add_network(inputs, parts + 1 + last, m.shared, columns);
  gives(gate - 1, columns);
  if (!m.gated) return;
  add_part(inputs, parts[gate], m.gate, columns);
  gives(gate, 1);
}

// Three rounds of products: router, shared gate and up; gate and up of the chosen experts; all down
// projections.
void mix(const Mixture &m, const Arrays &arrays, size_t &at, const float *x, int64_t count,
         int64_t columns, float *out) {
  const int64_t experts = arrays[at].shape(-2), chosen = m.choice.chosen, all = count * chosen;
  auto some = [](int64_t numbers) { return std::unique_ptr<float[]>(new float[numbers]); };
  const auto logits = some(count * experts), gates = some(count), shares = some(all);
  const auto given = some(all * columns), more = some(m.shared.count ? count * columns : 0);
  std::unique_ptr<uint32_t[]> which(new uint32_t[all]), expert(new uint32_t[all]);
  for (int64_t i = 0; i < all; i++) which[i] = uint32_t(i / chosen);
  const toast_vectors rows = {x, count, columns, TOAST_F32};
  const Vectors each = {rows, count}, some_experts = {rows, all, which.get(), expert.get()};

  const Part router(arrays, at, m.router, m.router_biased);
  std::unique_ptr<Contiguous> bias;
  if (m.choice_biased) bias = std::make_unique<Contiguous>(arrays[at++]);
  FeedForward few(m.experts, arrays, at, some_experts);
  std::unique_ptr<FeedForward> shared;
  std::unique_ptr<Part> gate;
  std::vector<Result> results = {{each, router, logits.get()}};
  if (m.shared.count) {
    shared = std::make_unique<FeedForward>(m.shared, arrays, at, each);
    if (m.gated) {
      gate = std::make_unique<Part>(arrays, at, m.gate, m.gate_biased);
      results.push_back({each, *gate, gates.get()});
    }
    shared->add_first_products(results);
  }
  multiply(m.activation_bits, results);

  const toast_vectors scores = {logits.get(), count, experts, TOAST_F32};
  need(toast_route(&scores, experts, &m.choice,
                   bias ? bias->floats() : nullptr, expert.get(),
                   shares.get()));
  results.clear();
  few.add_first_products(results);
  multiply(m.activation_bits, results);

  results.clear();
  results.push_back(few.last_product(given.get(), TOAST_F32));
  if (shared) results.push_back(shared->last_product(more.get(), TOAST_F32));
  multiply(m.activation_bits, results);
  const toast_vectors groups = {given.get(), all, columns, TOAST_F32};
  if (m.gated) {
    need(toast_blend(&groups, columns, chosen, shares.get(), more.get(), gates.get(), out));
    return;
  }
  need(toast_weighted_sums(&groups, columns, chosen, shares.get(), out, TOAST_F32));
  if (shared) add_vectors(out, more.get(), count, columns);
}

namespace {

// The mixture that is a layer's network; appends its arrays and those of the norm after it. Throws
// as add_matrix.
Mixture add_mixture_network(Arrays &inputs, Layer &layer, const toast_operands &given,
                            const toast_mixture &is) {
  check(!layer.is.network && layer.has[SECOND_NORM] && is.choice.chosen > 0,
        "two networks, or no experts, or no norm");
  const mx::array *parts[MIXED][GIVEN];
  const Mixture mixture = mixture_of(is, parts);
  const int64_t columns = inputs[0].shape(-1);
  add_mixture(inputs, parts, mixture, columns);
  add_norm(inputs, layer, FED_NORM, given, columns, columns);
  return mixture;
}

// Ends a layer that finish_layer left at out = norm(sum): out = m norm(mixture(out)) + sum, (count,
// columns) each. m: the layer's multiplier.
void finish_with_mixture(const Layer &layer, const Mixture &mixture, const Arrays &arrays,
                         size_t &at, const float *sum, int64_t count, float *out) {
  const int64_t columns = arrays[0].shape(-1);
  mix(mixture, arrays, at, out, count, columns, out);
  add_residual(layer, FED_NORM, arrays, at, out, sum, count, columns);
}

// A layer without attention: x + m network(norm(x)) of x (B, L, columns), m the multiplier. The
// parts of `given` are the network's, unless that is a mixture.
mx::array fed(const mx::array &x, const toast_layer &is, const toast_operands &given,
              const toast_mixture *mixture) {
  check_hidden_states(x);
  const int64_t columns = x.shape(-1);
  Layer layer = {is};
  Mixture of = {};
  Arrays inputs = {x};
  add_norm(inputs, layer, SECOND_NORM, given, columns, columns);
  check(layer.has[SECOND_NORM] && !mixture == (is.network != 0) && !is.layer_norms,
        "no norm, or not one network");
  if (mixture) {
    of = add_mixture_network(inputs, layer, given, *mixture);
  } else {
    const mx::array *parts[PARTS][GIVEN];
    layer.network = network_of(given, 0, is.network, false, is.activation, parts);
    add_network(inputs, parts, layer.network, columns);
    check(parts[is.network - 1][0]->shape(-2) == columns, "rows of another length");
  }
  const Weights weights = {1, inputs.size()};
  return lazy("ToastFed", x.shape(), mx::float32, std::move(inputs),
              [layer, of](const Arrays &arrays) {
    const int64_t columns = arrays[0].shape(-1), count = int64_t(arrays[0].size()) / columns;
    mx::array y = arrays.back();
    float *const out = y.data<float>();
    Contiguous rows(arrays[0]);
    size_t at = 1;
    apply_norm(layer, SECOND_NORM, arrays, at, rows.floats(), count * columns, out);
    if (of.choice.chosen)
      return finish_with_mixture(layer, of, arrays, at, rows.floats(), count, out);
    const Vectors vectors = {{out, count, columns, TOAST_F32}, count};
    feed(layer.network, arrays, at, vectors, out, TOAST_F32);
    add_residual(layer, FED_NORM, arrays, at, out, rows.floats(), count, columns);
  }, nullptr, weights);
}

}  // namespace

Ending add_ending(Arrays &inputs, Layer &layer, const toast_operands &given, int64_t attended,
                  const toast_mixture *mixture) {
  add_finish(inputs, layer, given, attended);
  if (mixture) return {add_mixture_network(inputs, layer, given, *mixture)};
  return {{}, layer.is.network || is_attention_only(layer) ? 1u : 2u};
}

void end_layer(const Layer &layer, const Ending &ending, const Arrays &arrays, size_t &at,
               const float *x, const float *attended, int64_t count, size_t outs,
               const float *own) {
  mx::array first = arrays[outs], last = arrays[outs + ending.outputs - 1];
  float *const out = last.data<float>();
  const bool apart = ending.outputs == 1 && !is_attention_only(layer);
  std::unique_ptr<float[]> memory(apart ? new float[first.size()] : nullptr);
  float *const sum = apart ? memory.get() : first.data<float>();
  finish_layer(layer, arrays, at, x, attended, count, sum, out, own);
  if (ending.mixture.choice.chosen)
    finish_with_mixture(layer, ending.mixture, arrays, at, sum, count, out);
}

}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to the output of a mixture. Lazy. Returns an error message or
// NULL.
TOAST_API const char *toast_mixture_array(void *out, void *x, const toast_mixture *is) {
  return set_array(out, [&] {
    const mx::array *parts[toast::MIXED][toast::GIVEN];
    const toast::Mixture mixture = toast::mixture_of(*is, parts);
    return toast::mixed(array_of(x), parts, mixture);
  });
}

// Sets `out`, an unshared array, to the output of a layer without attention. mixture: its network,
// or NULL. Lazy. Returns as above.
TOAST_API const char *toast_fed_array(void *out, void *x, const toast_operands *given,
                                      const toast_layer *layer, const toast_mixture *mixture) {
  return set_array(out, [&] { return toast::fed(array_of(x), *layer, *given, mixture); });
}

}  // extern "C"
