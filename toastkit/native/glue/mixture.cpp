// A mixture of experts as one MLX primitive: router, top-k choice, experts, weighted sum, and the
// gated shared expert; equal to the single operations to the bit.
#include "mixture.h"

namespace toast {

void check_choice(const toast_choice &choice, const mx::array *bias, int experts) {
  check(choice.chosen > 0 && choice.chosen <= experts, "too few experts");
  check(choice.groups <= 0 || (experts % choice.groups == 0 && choice.kept >= 0 &&
                               choice.kept <= choice.groups),
        "groups of other experts");
  check(!bias || (bias->dtype() == mx::float32 && bias->shape() == mx::Shape{experts}),
        "a bias of other experts");
}

namespace {

// Appends a mixture to `inputs`, of which the first is x, float32 with `columns` columns; the
// result has as many. Throws as add_part.
Mixture add_mixture(Arrays &inputs, const toast_mixture &is, int64_t columns) {
  const toast_operands &given = *is.given;
  Mixture m = {};
  m.choice = is.choice, m.activation_bits = given.activation_bits;
  const GivenPart router = part_of(given, 0);
  m.router = add_part(inputs, router, columns);
  const int experts = router.weight->shape(-2);
  const mx::array *bias = array_if(given.rest[0]);
  check_choice(m.choice, bias, experts);
  if ((m.choice_biased = bias)) inputs.push_back(*bias);
  m.experts = add_network(inputs, given, 1, is.experts, columns, is.activations[0], true);
  check(m.experts.alone || is.experts == PARTS, "other experts");
  check(m.experts.experts == experts, "stacks of other sizes");
  check(m.experts.rows == columns, "rows of another length");
  if (!is.shared) return m;
  m.shared = add_network(inputs, given, 1 + is.experts, is.shared, columns, is.activations[1]);
  check(m.shared.rows == columns, "rows of another length");
  if (!(m.gated = is.gated)) return m;
  const GivenPart gate = part_of(given, 1 + is.experts + is.shared);
  m.gate = add_part(inputs, gate, columns);
  check(gate.weight->shape(-2) == 1, "rows of another length");
  return m;
}

// The mixture of x (count, columns); out may be x. at: index of its first array; advanced past its
// last. Three rounds of products: router, shared gate and up; gate and up of the chosen experts;
// all down projections.
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

  const Part router(arrays, at, m.router);
  std::unique_ptr<Contiguous> bias;
  if (m.choice_biased) bias = std::make_unique<Contiguous>(arrays[at++]);
  FeedForward few(m.experts, arrays, at, some_experts);
  std::unique_ptr<FeedForward> shared;
  std::unique_ptr<Part> gate;
  std::vector<Result> results = {{each, router, logits.get()}};
  if (m.shared.count) {
    shared = std::make_unique<FeedForward>(m.shared, arrays, at, each);
    if (m.gated) {
      gate = std::make_unique<Part>(arrays, at, m.gate);
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

// The mixture of x (..., columns).
mx::array mixed(const mx::array &x, const toast_mixture &is) {
  check(x.ndim() >= 1 && x.dtype() == mx::float32, "vectors that are no float32");
  Arrays inputs = {x};
  const Mixture mixture = add_mixture(inputs, is, x.shape(-1));
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

// The mixture that is a layer's network; appends its arrays and those of the norm after it. Throws
// as add_part.
Mixture add_mixture_network(Arrays &inputs, Layer &layer, const toast_operands &given,
                            const toast_mixture &is) {
  check(!layer.is.network && layer.has[SECOND_NORM] && is.choice.chosen > 0,
        "two networks, or no experts, or no norm");
  const int64_t columns = inputs[0].shape(-1);
  const Mixture mixture = add_mixture(inputs, is, columns);
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
    layer.network = add_network(inputs, given, 0, is.network, columns, is.activation);
    check(layer.network.rows == columns, "rows of another length");
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
  return set_array(out, [&] { return toast::mixed(array_of(x), *is); });
}

// Sets `out`, an unshared array, to the output of a layer without attention. mixture: its network,
// or NULL. Lazy. Returns as above.
TOAST_API const char *toast_fed_array(void *out, void *x, const toast_operands *given,
                                      const toast_layer *layer, const toast_mixture *mixture) {
  return set_array(out, [&] { return toast::fed(array_of(x), *layer, *given, mixture); });
}

}  // extern "C"
