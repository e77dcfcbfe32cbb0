// The recurrences of kernels/recurrent.h as MLX primitives: gated delta rule, selective scans, WKV,
// linear recurrence. And the rows of batches of their states.
#include "recurrent.h"

#include <string.h>

#include <utility>

#include "../kernels/rows.h"

namespace toast {
namespace {

void check_mask(const mx::array *mask, int batch, int length) {
  check(!mask || (mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{batch, length}),
        "a mask of another shape");
}

// objects: q, k, v, a, b, a_log, bias, state, mask. Returns y and the new state. Without a_log and
// bias, a holds the decays. Decays, a and bias may be given for each column of a key.
Arrays gated_delta(void **objects, float factor) {
  Arrays inputs;
  const auto given = collect_inputs(objects, 9, inputs);
  const mx::array &q = inputs[0], &k = inputs[1], &v = inputs[2];
  check(k.ndim() == 4 && q.shape() == k.shape() && v.ndim() == 4 && k.shape(0) == v.shape(0) &&
            k.shape(1) == v.shape(1) && k.shape(2) > 0 && v.shape(2) % k.shape(2) == 0 &&
            k.shape(3) > 0,
        "queries, keys or values of another shape");
  const mx::Shape gates = {v.shape(0), v.shape(1), v.shape(2)}, heads = {v.shape(2)};
  const mx::Shape decays = {v.shape(0), v.shape(1), v.shape(2), k.shape(3)};
  const mx::Shape state = {v.shape(0), v.shape(2), v.shape(3), k.shape(3)};
  const bool columns = inputs[3].ndim() == 4;
  const mx::Shape biases = columns ? mx::Shape{v.shape(2), k.shape(3)} : heads;
  check(given[5] == given[6] && inputs[3].shape() == (columns ? decays : gates) &&
            inputs[4].shape() == gates && (columns || given[5]) &&
            (!given[5] || (inputs[5].shape() == heads && inputs[6].shape() == biases)),
        "gates of another shape");
  check_floats({inputs.begin(), inputs.end() - given[8]});
  check(!given[7] || inputs[given[5] ? 7 : 5].shape() == state, "a state of another shape");
  check_mask(given[8] ? &inputs.back() : nullptr, v.shape(0), v.shape(1));
  const int64_t batch = v.shape(0), length = v.shape(1), key_heads = k.shape(2);
  const int64_t value_heads = v.shape(2), key_size = k.shape(3), value_size = v.shape(3);
  return lazy("ToastGatedDelta", {v.shape(), state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-2], after = arrays.back();
    const OptionalFloats at(arrays, given);
    const toast_delta delta = {
        batch, length, key_heads, value_heads, key_size, value_size,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), factor, columns,
        at.operator()<uint8_t>(8), at(7),
    };
    need(toast_gated_delta(&delta, y.data<float>(), after.data<float>()));
  }, input_index(given, 7));
}

// objects: x, b, c, dt, a_log, d, bias, state, mask. Returns y and the new state. x of 3 axes is
// Mamba-1's selective scan (one head, no axis for it), of 4 axes Mamba-2's.
Arrays scanned(void **objects, float least, float most) {
  Arrays inputs;
  const auto given = collect_inputs(objects, 9, inputs);
  const mx::array &x = inputs[0], &b = inputs[1];
  const bool selective = x.ndim() == 3;
  const int size = x.shape(-1), numbers = b.shape(-1), heads = selective ? 1 : x.shape(2);
  const int groups = selective ? 1 : b.ndim() == 4 ? b.shape(2) : 0;
  check((selective || x.ndim() == 4) && b.ndim() == x.ndim() && b.shape() == inputs[2].shape() &&
            b.shape(0) == x.shape(0) && b.shape(1) == x.shape(1) && groups > 0 &&
            heads % groups == 0 && numbers > 0,
        "steps of another shape");
  const mx::Shape own = {selective ? size : heads}, dts = {x.shape(0), x.shape(1), own[0]};
  const mx::Shape a_log = selective ? mx::Shape{size, numbers} : own;
  const mx::Shape state = selective ? mx::Shape{x.shape(0), size, numbers}
                                    : mx::Shape{x.shape(0), heads, size, numbers};
  check(inputs[3].shape() == dts && inputs[4].shape() == a_log && inputs[5].shape() == own &&
            (given[6] ? inputs[6].shape() == own : selective),
        "gates of another shape");
  check_floats({inputs.begin(), inputs.end() - given[8]});
  check(!given[7] || inputs[6 + given[6]].shape() == state, "a state of another shape");
  check_mask(given[8] ? &inputs.back() : nullptr, x.shape(0), x.shape(1));
  const int64_t batch = x.shape(0), length = x.shape(1);
  return lazy("ToastScan", {x.shape(), state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-2], after = arrays.back();
    const OptionalFloats at(arrays, given);
    const toast_scan scan = {
        batch, length, heads, size, groups, numbers,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), least, most, selective,
        at.operator()<uint8_t>(8), at(7),
    };
    need(toast_scan_steps(&scan, y.data<float>(), after.data<float>()));
  }, input_index(given, 7));
}

// objects: r, w, k, v, a, b, state. Returns y and the new state (RWKV-7).
Arrays wkv(void **objects) {
  Arrays inputs;
  const auto given = collect_inputs(objects, 7, inputs);
  const mx::array &r = inputs[0];
  check(r.ndim() == 4 && r.shape(3) > 0, "steps of another shape");
  for (int i = 1; i < 6; i++)
    check(inputs[i].shape() == r.shape(), "steps of another shape");
  check_floats(inputs);
  const mx::Shape state = {r.shape(0), r.shape(2), r.shape(3), r.shape(3)};
  check(!given[6] || inputs[6].shape() == state, "a state of another shape");
  const mx::Shape of = r.shape();
  return lazy("ToastWkv", {of, state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-2], after = arrays.back();
    const OptionalFloats at(arrays, given);
    const toast_wkv steps = {of[0], of[1], of[2], of[3],
                             at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
    need(toast_wkv_steps(&steps, y.data<float>(), after.data<float>()));
  }, input_index(given, 6));
}

// objects: decays, x, state. Returns h after each step.
mx::array linear(void **objects) {
  Arrays inputs;
  const auto given = collect_inputs(objects, 3, inputs);
  const mx::Shape of = inputs[1].shape();
  check(of.size() == 3 && inputs[0].shape() == of, "steps of another shape");
  check_floats(inputs);
  check(!given[2] || inputs[2].shape() == mx::Shape{of[0], of[2]}, "a state of another shape");
  return lazy("ToastLinear", of, mx::float32, std::move(inputs), [=](const Arrays &arrays) {
    mx::array h = arrays.back();
    const OptionalFloats at(arrays, given);
    const toast_linear steps = {of[0], of[1], of[2], at(0), at(1), at(2)};
    toast_linear_steps(&steps, h.data<float>());
  });
}

// Allocates the rows of a batch, see `gathered`, in the buffer of the first input if that may be.
void allocate_rows(const Arrays &inputs, mx::array &out, bool forwards) {
  const mx::array &x = inputs[0];
  const mx::Strides strides = row_strides(out.shape());
  const mx::array::Flags flags = {true, true, out.size() <= 1};
  if (forwards && x.flags().row_contiguous && bytes_to_grow_in(x) >= int64_t(out.nbytes()) &&
      is_sole_owner(x))
    out.copy_shared_buffer(x, strides, flags, out.size());
  else if (!allocate_growing(out, strides, flags))
    out.set_data(memory_for(out));
}

// The rows of inputs[0] that are kept, followed by all rows of the others.
mx::array gathered(Arrays inputs, std::vector<int> kept) {
  const mx::array &x = inputs[0];
  check(x.ndim() > 1, "rows of no shape");
  mx::Shape shape = x.shape();
  shape[0] = int(kept.size());
  bool forwards = true;  // no row is overwritten before it is read
  for (int i = 0; i < int(kept.size()); i++) {
    check(kept[i] >= 0 && kept[i] < x.shape(0), "a row that is not there");
    forwards = forwards && kept[i] >= i;
  }
  for (size_t i = 1; i < inputs.size(); i++) {
    mx::Shape one = inputs[i].shape();
    check(one.size() == shape.size() && inputs[i].dtype() == x.dtype(), "other rows");
    shape[0] += std::exchange(one[0], x.shape(0));
    check(one == x.shape(), "rows of another shape");
  }
  const mx::Dtype dtype = x.dtype();
  return lazy("ToastGather", std::move(shape), dtype, std::move(inputs),
              [kept](const Arrays &arrays) {
    const mx::array &x = arrays[0];
    mx::array out = arrays.back();
    const int64_t row = int64_t(out.nbytes()) / out.shape(0);
    const Contiguous from(x);
    char *to = out.data<char>();
    for (size_t i = 0; i < kept.size(); i++, to += row)
      if (to != from.data() + kept[i] * row) memcpy(to, from.data() + kept[i] * row, row);
    if (from.data() == out.data<char>()) release_behind(out, int64_t(x.nbytes()));
    for (size_t i = 1; i + 1 < arrays.size(); to += arrays[i++].nbytes())
      memcpy(to, Contiguous(arrays[i]).data(), arrays[i].nbytes());
  }, [forwards](const Arrays &inputs, Arrays &outputs) {
    allocate_rows(inputs, outputs[0], forwards);
  });
}

}  // namespace
}  // namespace toast

// Each sets its first argument, unshared arrays, to what kernels/recurrent.h computes. Lazy.
// Absent objects are NULL. Returns an error message or NULL.
extern "C" {

TOAST_API const char *toast_gated_delta_array(void **outs, void **objects, float factor) {
  return set_arrays(outs, [&] { return toast::gated_delta(objects, factor); });
}

TOAST_API const char *toast_scan_array(void **outs, void **objects, float least, float most) {
  return set_arrays(outs, [&] { return toast::scanned(objects, least, most); });
}

TOAST_API const char *toast_wkv_array(void **outs, void **objects) {
  return set_arrays(outs, [&] { return toast::wkv(objects); });
}

// Rows of a batch. given: `count` arrays of rows alike. kept: n rows of the first one, to which
// those of the others are added: in its own buffer, if nobody else holds it and no row moves back.
TOAST_API const char *toast_gather_array(void *out, void **given, int count, const int *kept,
                                         int n) {
  return set_array(out, [&] {
    return toast::gathered(arrays_of(given, count), {kept, kept + n});
  });
}

TOAST_API const char *toast_linear_array(void *h, void **objects) {
  return set_array(h, [&] { return toast::linear(objects); });
}

}  // extern "C"
