// The recurrent layers of kernels/recurrent.h as MLX primitives.
#include "../kernels/recurrent.h"

#include "../kernels/rows.h"
#include "arrays.h"

namespace toast {
namespace {

// Float32 in their order; NULL for what is not given. given: which of them are.
class Floats {
 public:
  Floats(const Arrays &arrays, const std::vector<bool> &given) : at_(given.size(), -1) {
    data_.reserve(given.size());
    for (size_t i = 0, next = 0; i < given.size(); i++)
      if (given[i]) at_[i] = int(next), data_.emplace_back(arrays[next++]);
  }
  template <class T = float>
  const T *operator()(size_t i) const {
    return at_[i] < 0 ? nullptr : reinterpret_cast<const T *>(data_[at_[i]].data());
  }

 private:
  std::vector<int> at_;
  std::vector<InOrder> data_;
};

// What is given of the objects; the arrays among them to `inputs`.
std::vector<bool> taken(void **objects, int count, Arrays &inputs) {
  std::vector<bool> given;
  for (int i = 0; i < count; i++) {
    given.push_back(objects[i]);
    if (objects[i]) inputs.push_back(array_of(objects[i]));
  }
  return given;
}

// Where an input is among those that are given; -1 for one that is not.
int place_of(const std::vector<bool> &given, int i) {
  int before = 0;
  for (int k = 0; k < i; k++) before += given[k];
  return given[i] ? before : -1;
}

void check_floats(const Arrays &inputs) {
  for (auto &one : inputs) check(one.dtype() == mx::float32, "numbers that are no float32");
}

void check_mask(const mx::array *mask, int batch, int length) {
  check(!mask || (mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{batch, length}),
        "a mask of another shape");
}

// Of q, k, v, a, b, a_log, bias, the state, the mask: y and the state after it.
Arrays gated_delta(void **objects, float factor) {
  Arrays inputs;
  const auto given = taken(objects, 9, inputs);
  const mx::array &q = inputs[0], &k = inputs[1], &v = inputs[2];
  check(k.ndim() == 4 && q.shape() == k.shape() && v.ndim() == 4 && k.shape(0) == v.shape(0) &&
            k.shape(1) == v.shape(1) && k.shape(2) > 0 && v.shape(2) % k.shape(2) == 0 &&
            k.shape(3) > 0,
        "queries, keys or values of another shape");
  const mx::Shape gates = {v.shape(0), v.shape(1), v.shape(2)}, heads = {v.shape(2)};
  const mx::Shape state = {v.shape(0), v.shape(2), v.shape(3), k.shape(3)};
  check(inputs[3].shape() == gates && inputs[4].shape() == gates && inputs[5].shape() == heads &&
            inputs[6].shape() == heads,
        "gates of another shape");
  check_floats({inputs.begin(), inputs.end() - given[8]});
  check(!given[7] || inputs[7].shape() == state, "a state of another shape");
  check_mask(given[8] ? &inputs.back() : nullptr, v.shape(0), v.shape(1));
  const toast_delta of = {v.shape(0), v.shape(1), k.shape(2), v.shape(2), k.shape(3), v.shape(3)};
  return made("ToastGatedDelta", {v.shape(), state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-2], after = arrays.back();
    const Floats at(arrays, given);
    const toast_delta delta = {
        of.batch, of.length, of.key_heads, of.value_heads, of.key_size, of.value_size,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), factor, at.operator()<uint8_t>(8), at(7),
    };
    need(toast_gated_delta(&delta, y.data<float>(), after.data<float>()));
  }, place_of(given, 7));
}

// Of x, b, c, dt, a_log, d, bias, the state, the mask: y and the state after it.
Arrays scanned(void **objects, float least, float most) {
  Arrays inputs;
  const auto given = taken(objects, 9, inputs);
  const mx::array &x = inputs[0], &b = inputs[1];
  check(x.ndim() == 4 && b.ndim() == 4 && b.shape() == inputs[2].shape() &&
            b.shape(0) == x.shape(0) && b.shape(1) == x.shape(1) && b.shape(2) > 0 &&
            x.shape(2) % b.shape(2) == 0 && b.shape(3) > 0,
        "steps of another shape");
  const mx::Shape heads = {x.shape(2)}, state = {x.shape(0), x.shape(2), x.shape(3), b.shape(3)};
  check(inputs[3].shape() == mx::Shape{x.shape(0), x.shape(1), x.shape(2)} &&
            inputs[4].shape() == heads && inputs[5].shape() == heads && inputs[6].shape() == heads,
        "gates of another shape");
  check_floats({inputs.begin(), inputs.end() - given[8]});
  check(!given[7] || inputs[7].shape() == state, "a state of another shape");
  check_mask(given[8] ? &inputs.back() : nullptr, x.shape(0), x.shape(1));
  const toast_scan of = {x.shape(0), x.shape(1), x.shape(2), x.shape(3), b.shape(2), b.shape(3)};
  return made("ToastScan", {x.shape(), state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-2], after = arrays.back();
    const Floats at(arrays, given);
    const toast_scan scan = {
        of.batch, of.length, of.heads, of.size, of.groups, of.state_size,
        at(0), at(1), at(2), at(3), at(4), at(5), at(6), least, most, at.operator()<uint8_t>(8),
        at(7),
    };
    need(toast_scan_steps(&scan, y.data<float>(), after.data<float>()));
  }, place_of(given, 7));
}

struct Sizes {
  int key_heads, value_heads, key_size, value_size;
};

// The projections of a layer as they lie: queries, keys, values, z of each key head in one array,
// and b and a of each in another; or queries, keys and values, z, b, a in arrays of their own.
void lay_out(toast_delta_layer &l, const Floats &at) {
  const int64_t each = l.value_heads / l.key_heads, keys = l.key_size, values = each * l.value_size;
  const int64_t heads = l.key_heads;
  if (at(2)) {
    const int64_t step = heads * (2 * keys + values), gates = heads * each;
    l.q = {at(0), step, keys}, l.k = {at(0) + heads * keys, step, keys};
    l.v = {at(0) + 2 * heads * keys, step, values}, l.z = {at(1), heads * values, values};
    l.b = {at(2), gates, each}, l.a = {at(3), gates, each};
  } else {
    const int64_t head = 2 * (keys + values), step = heads * head, gates = heads * 2 * each;
    l.q = {at(0), step, head}, l.k = {at(0) + keys, step, head};
    l.v = {at(0) + 2 * keys, step, head}, l.z = {at(0) + 2 * keys + values, step, head};
    l.b = {at(1), gates, 2 * each}, l.a = {at(1) + each, gates, 2 * each};
  }
}

// Of the projections, two or four; the weight, what came before, a_log, bias, the norm, the state.
Arrays delta_layer(void **objects, Sizes of, float eps) {
  Arrays inputs;
  const auto given = taken(objects, 10, inputs);
  check_floats(inputs);
  const int batch = inputs[0].shape(0), length = inputs[0].ndim() == 3 ? inputs[0].shape(1) : 0;
  check(of.key_heads > 0 && of.value_heads % of.key_heads == 0 && of.key_size > 0, "such heads");
  const int keys = of.key_heads * of.key_size, values = of.value_heads * of.value_size;
  const int channels = 2 * keys + values;
  auto is = [&](int i, const mx::Shape &shape) {
    return !given[i] || inputs[place_of(given, i)].shape() == shape;
  };
  auto steps = [&](int i, int size) { return is(i, {batch, length, size}); };
  check(given[2] ? steps(0, channels) && steps(1, values) && steps(2, of.value_heads) &&
                       steps(3, of.value_heads)
                 : steps(0, channels + values) && steps(1, 2 * of.value_heads),
        "projections of another shape");
  const mx::array &weight = inputs[place_of(given, 4)];
  check(weight.ndim() == 3 && weight.shape(1) > 0 && weight.shape(1) <= MOST_KERNEL &&
            is(4, {channels, weight.shape(1), 1}) &&
            is(5, {batch, weight.shape(1) - 1, channels}),
        "a convolution of another shape");
  const mx::Shape state = {batch, of.value_heads, of.value_size, of.key_size};
  check(is(6, {of.value_heads}) && is(7, {of.value_heads}) && is(8, {of.value_size}) &&
            is(9, state),
        "parameters or a state of another shape");
  const int kernel = weight.shape(1);
  const std::vector<mx::Shape> shapes = {{batch, length, values}, {batch, kernel - 1, channels},
                                         state};
  return made("ToastDeltaLayer", shapes, {mx::float32, mx::float32, mx::float32},
              std::move(inputs), [=](const Arrays &arrays) {
    mx::array y = arrays.end()[-3], last = arrays.end()[-2], after = arrays.back();
    const Floats at(arrays, given);
    toast_delta_layer l = {batch, length, of.key_heads, of.value_heads, of.key_size, of.value_size};
    lay_out(l, at);
    l.kernel = kernel, l.weight = at(4), l.before = at(5), l.a_log = at(6), l.bias = at(7);
    l.norm = at(8), l.eps = eps, l.state = at(9);
    need(toast_delta_layer_steps(&l, y.data<float>(), last.data<float>(), after.data<float>()));
  }, place_of(given, 9));
}

}  // namespace
}  // namespace toast

// Each makes its first objects, arrays that nobody else has, what kernels/recurrent.h gives. Lazy.
// What is not given of the objects is NULL. Returns what is wrong; NULL where nothing is.
extern "C" {

TOAST_API const char *toast_gated_delta_array(void *y, void *after, void **objects, float factor) {
  return toast::wrong([&] {
    auto made = toast::gated_delta(objects, factor);
    toast::array_of(y) = made[0];
    toast::array_of(after) = made[1];
  });
}

TOAST_API const char *toast_scan_array(void *y, void *after, void **objects, float least,
                                       float most) {
  return toast::wrong([&] {
    auto made = toast::scanned(objects, least, most);
    toast::array_of(y) = made[0];
    toast::array_of(after) = made[1];
  });
}

TOAST_API const char *toast_delta_layer_array(void *y, void *last, void *after, void **objects,
                                              int key_heads, int value_heads, int key_size,
                                              int value_size, float eps) {
  return toast::wrong([&] {
    auto made = toast::delta_layer(objects, {key_heads, value_heads, key_size, value_size}, eps);
    toast::array_of(y) = made[0];
    toast::array_of(last) = made[1];
    toast::array_of(after) = made[2];
  });
}

}  // extern "C"
