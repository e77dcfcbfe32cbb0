// A layer of RWKV-7 (arXiv 2503.14456) as one MLX primitive: time mixing in place of attention, and
// a network that reads shifted tokens.
#include <cmath>
#include <numeric>
#include <optional>

#include "../kernels/rows.h"
#include "recurrent.h"

namespace toast {
namespace {

// Projections of low rank: logits of decays and of rates, gates, logits of the first layer's share
// of values, which that layer lacks.
enum { DECAY, RATE, GATE, SHARE, LOW_RANKS };

// Arrays of one number for each column: how much of the token before is mixed in, for receptances,
// keys, values, each of LOW_RANKS (values serve for SHARE) and the network; then those of
// toast_time_mixing.
enum {
  MIX_R, MIX_K, MIX_V, MIX_LOW, MIX_NETWORK = MIX_LOW + SHARE, K_K, K_A, R_K, NORM, NORM_BIAS, OWN
};

constexpr int STATES = 3;  // the last inputs of time mixing and of the network, the recurrence's

struct TimeMixing {
  Layer layer;
  int heads;
  bool begun, first;  // first: the first layer
  Packing low[LOW_RANKS][2] = {};
  int ranks[LOW_RANKS] = {};
  int projections() const { return first ? SHARE : LOW_RANKS; }
};

// The arrays of a node while it computes, and where its parts begin.
struct MixingInputs {
  MixingInputs(const TimeMixing &m, const Arrays &arrays) : x(arrays[0]) {
    before.reserve(STATES + 1), own.reserve(OWN);
    size_t at = 1;
    for (int i = 0; m.begun && i < STATES; i++) before.emplace_back(arrays[at++]);
    if (!m.first) values.emplace(arrays[at++]);
    for (int i = 0; i < OWN; i++) own.emplace_back(arrays[at++]);
    parts = at;
  }
  const float *state(int i) { return before.empty() ? nullptr : before[i].floats(); }
  Contiguous x;
  std::vector<Contiguous> before, own;
  std::optional<Contiguous> values;  // of the first layer
  size_t parts;
};

// Time mixing of x (batch, length, columns), which is normed, up to the output projection: y. at:
// index of the first part; advanced past the last. after: the recurrence's new state.
void mix_time(const TimeMixing &m, const Arrays &arrays, size_t &at, MixingInputs &in,
              const float *x, float *values, float *y, float *after) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, all = count * columns;
  const int ranks = std::accumulate(m.ranks, m.ranks + LOW_RANKS, 0);
  std::unique_ptr<float[]> memory(new float[(MIX_NETWORK + 2) * all + count * ranks]);
  float *const r = memory.get(), *const k = r + all, *const mixed = k + all;
  float *low[LOW_RANKS] = {mixed + MIX_NETWORK * all};
  std::vector<Vectors> from, lows;
  from.reserve(MIX_NETWORK), lows.reserve(LOW_RANKS);  // results refer to them
  for (int i = 0; i < MIX_NETWORK; i++) {
    float *const out = mixed + i * all;
    toast_token_shift(x, in.state(0), batch, length, columns, in.own[i].floats(), out);
    from.push_back({{out, count, columns, TOAST_F32}, count});
  }
  std::optional<Part> heads[HEADS], parts[LOW_RANKS][2];
  for (int i = 0; i < HEADS; i++) heads[i].emplace(arrays, at, m.layer.packing[i]);
  std::vector<Result> results = {{from[MIX_R], *heads[0], r}, {from[MIX_K], *heads[1], k}};
  for (int i = 0; i < m.projections(); i++) {
    for (int j = 0; j < 2; j++) parts[i][j].emplace(arrays, at, m.low[i][j]);
    if (i) low[i] = low[i - 1] + count * m.ranks[i - 1];
    lows.push_back({{low[i], count, m.ranks[i], TOAST_F32}, count});
    results.push_back({from[i == SHARE ? MIX_V : MIX_LOW + i], *parts[i][0], low[i]});
  }
  results.push_back({from[MIX_V], *heads[2], values});
  toast::multiply(m.layer.activation_bits, results);
  for (int64_t i = 0; i < count * m.ranks[DECAY]; i++) low[DECAY][i] = std::tanh(low[DECAY][i]);
  need(toast_gate(low[GATE], nullptr, count * m.ranks[GATE], TOAST_F32, TOAST_SIGMOID, low[GATE]));
  results.clear();
  for (int i = 0; i < m.projections(); i++)  // where the mixed rows were
    results.push_back({lows[i], *parts[i][1], mixed + i * all});
  toast::multiply(m.layer.activation_bits, results);
  auto own = [&](int i) { return in.own[i].floats(); };
  const toast_time_mixing mixing = {
      batch, length, m.heads, columns / m.heads, r, mixed + GATE * all,
      m.first ? nullptr : in.values->floats(), mixed + DECAY * all, k, values, mixed + RATE * all,
      mixed + LOW_RANKS * all, m.first ? nullptr : mixed + SHARE * all, own(K_K), own(K_A),
      own(R_K), own(NORM), own(NORM_BIAS), m.layer.is.eps[VALUE_NORM], in.state(STATES - 1),
  };
  need(toast_time_mixing_steps(&mixing, y, after));
}

// arrays, in order: x; the states, if begun; the first layer's values, but in that; OWN arrays;
// input norm; r, k, v; the low ranks'; those of finish_layer. Outputs: the layer's; its values, if
// it is the first; the new states.
void compute(const TimeMixing &m, const Arrays &arrays) {
  const int64_t batch = arrays[0].shape(0), length = arrays[0].shape(1);
  const int64_t columns = arrays[0].shape(2), count = batch * length, all = count * columns;
  const size_t outs = arrays.size() - STATES - 1 - m.first;
  mx::array out = arrays[outs], first = arrays[outs + 1];
  mx::array states[STATES] = {arrays.end()[-3], arrays.end()[-2], arrays.back()};
  MixingInputs in(m, arrays);
  size_t at = in.parts;
  std::unique_ptr<float[]> memory(new float[4 * all]);
  float *const normed = memory.get(), *const y = normed + all, *const sum = y + all;
  apply_norm(m.layer, FIRST_NORM, arrays, at, in.x.floats(), all, normed);
  mix_time(m, arrays, at, in, normed, m.first ? first.data<float>() : sum + all, y,
           states[2].data<float>());
  save_last_rows(normed, batch, length, columns, in.state(0), 1, columns, states[0].data<float>());

  size_t second = at;
  at += 1 + m.layer.biased_norms[1];
  const Part projection(arrays, at, m.layer.packing[OUT]);
  const Vectors mixed = {{y, count, columns, TOAST_F32}, count};
  toast::multiply(m.layer.activation_bits, {{mixed, projection, sum}});
  add_vectors(sum, in.x.floats(), count, columns);
  apply_norm(m.layer, SECOND_NORM, arrays, second, sum, all, normed);
  toast_token_shift(normed, in.state(1), batch, length, columns, in.own[MIX_NETWORK].floats(), y);
  save_last_rows(normed, batch, length, columns, in.state(1), 1, columns, states[1].data<float>());
  feed(m.layer.network, arrays, at, mixed, out.data<float>(), TOAST_F32);
  add_vectors(out.data<float>(), sum, count, columns);
}

// first: values of the first layer, NULL in that. before: the states, all NULL at the start of a
// sequence.
Arrays time_mixing(const mx::array &x, const mx::array *first, void **before,
                   const toast_layer &is, const toast_operands &given) {
  TimeMixing m = {{is}, is.heads, before[0] != nullptr, !first};
  const int batch = x.shape(0), columns = x.shape(-1), size = m.heads > 0 ? columns / m.heads : 0;
  check(size > 0 && columns % m.heads == 0, "heads of another size");
  const mx::Shape heads = {batch, x.ndim() > 1 ? x.shape(1) : 0, m.heads, size};
  const mx::Shape state = {batch, m.heads, size, size}, row = {batch, 1, columns};
  Arrays inputs = begin_layer(x, before, {row, row, state});
  if (first) {
    check(first->shape() == heads && first->dtype() == mx::float32, "values of another shape");
    inputs.push_back(*first);
  }
  for (int i = 0; i < OWN; i++) {
    const mx::array &own = rest_of(given, NORM_BIASES + 2 + i);
    check(own.size() == size_t(columns) && own.dtype() == mx::float32, "other columns");
    inputs.push_back(own);
  }
  Layer &layer = m.layer;
  check(is.layer_norms && is.network == 2 && !is.parallel && !is.layer_input &&
            is.multiplier == 1 && given.rest[FIRST_NORM] && given.rest[SECOND_NORM] &&
            !given.rest[ATTENDED_NORM] && !given.rest[FED_NORM] && !given.rest[FACTOR],
        "a layer of another form");
  add_norm(inputs, layer, FIRST_NORM, given, columns, columns);
  for (int i = 0; i < HEADS; i++)
    check(add_layer_part(inputs, layer, i, given, i, columns) == columns, "heads of another size");
  for (int i = 0; i < m.projections(); i++) {
    const int place = OUT + 1 + is.network + 2 * i;
    const GivenPart down = part_of(given, place), up = part_of(given, place + 1);
    m.low[i][0] = add_part(inputs, down, columns);
    m.ranks[i] = down.weight->shape(-2);
    m.low[i][1] = add_part(inputs, up, m.ranks[i]);
    check(up.weight->shape(-2) == columns, "rows of another length");
  }
  add_finish(inputs, layer, given, columns);
  std::vector<mx::Shape> shapes = {x.shape(), row, row, state};
  if (m.first) shapes.insert(shapes.begin() + 1, heads);
  const std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  const Weights weights = {size_t(1 + STATES * m.begun + !m.first), inputs.size()};
  return lazy("ToastTimeMixing", std::move(shapes), dtypes, std::move(inputs),
              [m](const Arrays &arrays) { compute(m, arrays); }, m.begun ? STATES : -1, weights);
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `outs`, unshared arrays, to the output of a layer; to its values, if it is the first; and to
// its new states. first: values of the first layer, NULL in that. before ... state: the last inputs
// of time mixing and of the network, and the recurrence's state; NULL for all at the start of a
// sequence. Parts: receptances, keys, values, out; keys and values of the network; both of each low
// rank. Lazy. Returns an error message or NULL.
TOAST_API const char *toast_time_mixing_array(void **outs, void *x, void *first, void *before,
                                              void *network_before, void *state,
                                              const toast_operands *given,
                                              const toast_layer *layer) {
  void *states[] = {before, network_before, state};
  return set_arrays(outs, [&] {
    return toast::time_mixing(array_of(x), array_if(first), states, *layer, *given);
  });
}

}  // extern "C"
