// The gated delta rule of kernels/delta.h as an MLX primitive.
#include "../kernels/delta.h"

#include "arrays.h"

namespace toast {
namespace {

// Of q, k, v, a, b, a_log, bias, then the state and the mask where there are some: y and the state
// after it.
void compute(const Arrays &arrays, bool begun, bool masked, float factor) {
  const size_t count = arrays.size() - 2;
  mx::array y = arrays[count], after = arrays[count + 1];
  std::vector<InOrder> data;
  data.reserve(count);
  for (size_t i = 0; i < count; i++) data.emplace_back(arrays[i]);
  auto at = [&](size_t i) { return reinterpret_cast<const float *>(data[i].data()); };
  const mx::array &k = arrays[1], &v = arrays[2];
  const toast_delta delta = {
      v.shape(0), v.shape(1), k.shape(2), v.shape(2), k.shape(3), v.shape(3),
      at(0), at(1), at(2), at(3), at(4), at(5), at(6), factor,
      masked ? reinterpret_cast<const uint8_t *>(data[count - 1].data()) : nullptr,
      begun ? at(7) : nullptr,
  };
  need(toast_gated_delta(&delta, y.data<float>(), after.data<float>()));
}

Arrays gated_delta(Arrays inputs, bool begun, bool masked, float factor) {
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
  for (size_t i = 0; i < inputs.size() - masked; i++)
    check(inputs[i].dtype() == mx::float32, "numbers that are no float32");
  check(!begun || inputs[7].shape() == state, "a state of another shape");
  if (masked)
    check(inputs.back().dtype() == mx::bool_ &&
              inputs.back().shape() == mx::Shape{v.shape(0), v.shape(1)},
          "a mask of another shape");
  return made("ToastGatedDelta", {v.shape(), state}, {mx::float32, mx::float32}, std::move(inputs),
              [=](const Arrays &arrays) { compute(arrays, begun, masked, factor); });
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `y` and `after`, arrays that nobody else has, what the rule gives. Lazy. arrays: the seven,
// the state and the mask; the last two may be NULL. Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_gated_delta_array(void *y, void *after, void **arrays, float factor) {
  using toast::array_of;
  return toast::wrong([&] {
    toast::Arrays inputs;
    for (int i = 0; i < 9; i++)
      if (arrays[i]) inputs.push_back(array_of(arrays[i]));
    auto made = toast::gated_delta(std::move(inputs), arrays[7], arrays[8], factor);
    array_of(y) = made[0];
    array_of(after) = made[1];
  });
}

}  // extern "C"
