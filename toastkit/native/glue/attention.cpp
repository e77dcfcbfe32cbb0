// Scaled dot-product attention as an MLX primitive. Caches are read in place, whatever their
// strides.
#include "caches.h"

namespace toast {
namespace {

toast_rows described(const mx::array &a, const Rows &rows) {
  return {rows.data(), {rows.stride(0), rows.stride(1), rows.stride(2)}, cache_type(a)};
}

// A mask that is broadcast to scores (batch, heads, positions, keys).
void set_mask(toast_attention &call, const mx::array &a, const Rows &rows) {
  const bool bytes = a.dtype() == mx::bool_;
  call.masking = bytes ? TOAST_VISIBLE : TOAST_ADDED;
  call.mask_type = bytes ? TOAST_F32 : type_of(a);
  call.mask = rows.data();
  for (int axis = int(a.ndim()) - 2, to = 2; to >= 0; axis--, to--)
    call.mask_strides[to] = axis < 0 || a.shape(axis) == 1 ? 0 : rows.stride(axis);
}

void compute(const Arrays &arrays, float scale, float cap, int masking, bool sinks) {
  const Rows queries(arrays[0]), keys(arrays[1]), values(arrays[2]);
  mx::array out = arrays.back();
  toast_attention call = {
      described(arrays[0], queries), described(arrays[1], keys), described(arrays[2], values),
      arrays[0].shape(0), arrays[0].shape(1), arrays[1].shape(1), arrays[0].shape(2),
      arrays[1].shape(2), arrays[0].shape(3), head_size(arrays[2]), scale, masking, nullptr, {}, 0,
      nullptr, cap,
  };
  std::optional<Rows> mask;
  if (masking >= TOAST_VISIBLE) set_mask(call, arrays[3], mask.emplace(arrays[3]));
  std::optional<Contiguous> heads;
  if (sinks) {
    heads.emplace(arrays[arrays.size() - 2]);
    call.sinks = heads->floats();
  }
  const int64_t strides[3] = {out.strides(0), out.strides(1), out.strides(2)};
  need(toast_attend(&call, out.data<char>(), strides, type_of(out)));
}

// Attention of one query a row, each to keys and values of its own. arrays: queries, then keys and
// values of each row, sinks if any, and the output.
void compute_apart(const Arrays &arrays, const std::vector<int> &lengths, float scale, float cap) {
  const int64_t n = int64_t(lengths.size());
  const mx::array &q = arrays[0];
  mx::array out = arrays.back();
  const Rows queries(q);
  std::deque<Rows> caches;
  for (int64_t i = 1; i <= 2 * n; i++) caches.emplace_back(arrays[i]);
  std::optional<Contiguous> sinks;
  if (int64_t(arrays.size()) > 2 * n + 2) sinks.emplace(arrays[2 * n + 1]);
  std::vector<toast_attention> calls;
  std::vector<void *> outs;
  for (int64_t i = 0; i < n; i++) {
    const mx::array &keys = arrays[1 + 2 * i], &values = arrays[2 + 2 * i];
    toast_rows own = described(q, queries);
    own.data = queries.data() + i * queries.stride(0) * int64_t(q.itemsize());
    calls.push_back({own, described(keys, caches[2 * i]), described(values, caches[2 * i + 1]), 1,
                     q.shape(1), keys.shape(1), 1, lengths[i], q.shape(3), head_size(values), scale,
                     TOAST_ALL, nullptr, {}, 0, sinks ? sinks->floats() : nullptr, cap});
    outs.push_back(out.data<char>() + i * out.strides(0) * int64_t(out.itemsize()));
  }
  const int64_t strides[3] = {out.strides(0), out.strides(1), out.strides(2)};
  need(toast_attend_all(calls.data(), int32_t(n), outs.data(), strides, type_of(out)));
}

void check_sinks(const mx::array &sinks, const mx::array &q) {
  check(sinks.dtype() == mx::float32 && sinks.ndim() == 1 && sinks.shape(0) == q.shape(1),
        "sinks of other heads");
}

// What attention to keys and values comes out as.
mx::Dtype attended_type(const mx::array &q, const mx::array &k, const mx::array &v) {
  auto fits = [&](const mx::array &a) { return a.dtype() == q.dtype() || a.dtype() == mx::int8; };
  return fits(k) && fits(v) ? q.dtype() : mx::float32;
}

// Checks queries (batch, heads, positions, size) and what they are to attend to.
void check_heads(const mx::array &q, const mx::array &k, const mx::array &v) {
  check(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4, "rows that have not four axes");
  check(k.shape(0) == v.shape(0), "keys of another batch");
  check(k.shape(1) == v.shape(1) && k.shape(1) && q.shape(1) % k.shape(1) == 0,
        "heads that cannot be shared");
  check(k.shape(2) == v.shape(2) && k.shape(2), "no keys, or not as many values");
  check(q.shape(3) == head_size(k) && q.shape(3) && head_size(v) > 0, "keys of another size");
  type_of(q), cache_type(k), cache_type(v);
}

mx::array attention_apart(Arrays inputs, std::vector<int> lengths, float scale, float cap,
                          const mx::array *sinks) {
  const mx::array &q = inputs[0];
  check(q.ndim() == 4 && q.shape(0) == int(lengths.size()) && q.shape(0) && q.shape(2) == 1,
        "not one query a row");
  for (size_t i = 0; i < lengths.size(); i++) {
    const mx::array &k = inputs[1 + 2 * i], &v = inputs[2 + 2 * i];
    check_heads(q, k, v);
    check(k.shape(0) == 1 && lengths[i] > 0 && lengths[i] <= k.shape(2), "no keys of its own");
    check(head_size(v) == head_size(inputs[2]), "values of another size");
  }
  const mx::Shape shape = {q.shape(0), q.shape(1), 1, head_size(inputs[2])};
  const mx::Dtype dtype = attended_type(q, inputs[1], inputs[2]);
  if (sinks) {
    check_sinks(*sinks, q);
    inputs.push_back(*sinks);
  }
  return lazy("ToastAttentionApart", shape, dtype, std::move(inputs),
              [scale, cap, lengths = std::move(lengths)](const Arrays &arrays) {
    compute_apart(arrays, lengths, scale, cap);
  }, allocate_reader);
}

void check_mask(const mx::array &mask, const mx::array &q, const mx::array &k) {
  const int shape[4] = {q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  check(mask.ndim() >= 1 && mask.ndim() <= 4 && mask.shape(-1) == k.shape(2),
        "a mask of another shape");
  for (int axis = int(mask.ndim()) - 1, of = 3; axis >= 0; axis--, of--)
    check(mask.shape(axis) == 1 || mask.shape(axis) == shape[of], "a mask of another shape");
  if (mask.dtype() != mx::bool_) type_of(mask);
}

mx::array attention(const mx::array &q, const mx::array &k, const mx::array &v, float scale,
                    float cap, const mx::array *mask, bool causal, const mx::array *sinks) {
  check_heads(q, k, v);
  check(q.shape(0) == k.shape(0), "keys of another batch");
  Arrays inputs = {q, k, v};
  if (mask) {
    check_mask(*mask, q, k);
    inputs.push_back(*mask);
  }
  if (sinks) {
    check_sinks(*sinks, q);
    inputs.push_back(*sinks);
  }
  const int masking = !mask ? causal ? TOAST_CAUSAL : TOAST_ALL
                            : mask->dtype() == mx::bool_ ? TOAST_VISIBLE : TOAST_ADDED;
  return lazy("ToastAttention", {q.shape(0), q.shape(1), q.shape(2), head_size(v)},
              attended_type(q, k, v), std::move(inputs),
              [scale, cap, masking, given = sinks != nullptr](const Arrays &arrays) {
    compute(arrays, scale, cap, masking, given);
  }, allocate_by_position);
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to the attention output. Lazy. mask, sinks: or NULL. Returns an
// error message or NULL.
TOAST_API const char *toast_attend_array(void *out, void *q, void *k, void *v, void *mask,
                                         void *sinks, float scale, float cap, int causal) {
  return set_array(out, [&] {
    return toast::attention(array_of(q), array_of(k), array_of(v), scale, cap, array_if(mask),
                            causal != 0, array_if(sinks));
  });
}

// The same of n rows of one query each, with keys and values of their own. given: queries, then
// keys and values of each row in turn, (1, key heads, M, size). lengths: of each, the positions
// that it attends to, from the first on.
TOAST_API const char *toast_attend_apart_array(void *out, void **given, const int *lengths, int n,
                                               void *sinks, float scale, float cap) {
  return set_array(out, [&] {
    return toast::attention_apart(arrays_of(given, 2 * n + 1), {lengths, lengths + n}, scale, cap,
                                  array_if(sinks));
  });
}

}  // extern "C"
