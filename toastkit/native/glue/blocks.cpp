// What lies in a layer before its attention and behind it, as MLX primitives: the kernels of norms,
// products and gates one after another, to the bit what these give in float32 as operations.
#include <numeric>

#include "../kernels/rows.h"
#include "feed_forward.h"

namespace toast {
namespace {

struct Norm {
  float eps;
  // Of x (count, columns), float32.
  void compute(const mx::array &weight, const float *x, int64_t count, int64_t columns,
               float *out) const {
    InOrder weights(weight);
    const toast_vectors rows = {x, count, columns, TOAST_F32};
    need(toast_rms_norm(&rows, columns, weights.data(), type_of(weight), 0, eps, out, TOAST_F32));
  }
};

void check_rows(const mx::array &x, const mx::array &norm) {
  check(x.ndim() == 3 && x.dtype() == mx::float32, "positions of another shape");
  check(norm.shape() == mx::Shape{x.shape(-1)}, "a weight of another length");
  type_of(norm);
}

// A part as Python gives it: its arrays, NULL for those that it has not. packing: bits, group size.
Packing given(void *const *objects, const int *packing, const mx::array *(&part)[GIVEN]) {
  for (int i = 0; i < GIVEN; i++) part[i] = objects[i] ? &array_of(objects[i]) : nullptr;
  return {packing[0], packing[1], false, objects[2]};
}

// Products of the norm of x (B, L, columns) with each part, as so many heads: (B, heads, L, size).
Arrays projected(const mx::array &x, const mx::array &weight, Norm norm,
                 const mx::array *const (*parts)[GIVEN], const std::vector<Packing> &packing,
                 const std::vector<int> &heads, bool exact) {
  check_rows(x, weight);
  Arrays inputs = {x, weight};
  std::vector<mx::Shape> shapes;
  std::vector<bool> biased;
  for (size_t i = 0; i < packing.size(); i++) {
    add_part(inputs, parts[i], packing[i], x.shape(-1));
    biased.push_back(parts[i][GIVEN - 1]);
    const int rows = parts[i][0]->shape(-2);
    check(heads[i] > 0 && rows % heads[i] == 0, "heads of other sizes");
    shapes.push_back({x.shape(0), heads[i], x.shape(1), rows / heads[i]});
  }
  const std::vector<mx::Dtype> dtypes(packing.size(), mx::float32);
  return made("ToastProjected", std::move(shapes), dtypes, std::move(inputs),
              [=](const Arrays &arrays) {
    const int64_t columns = arrays[0].shape(-1), count = int64_t(arrays[0].size()) / columns;
    InOrder rows(arrays[0]);
    std::unique_ptr<float[]> normed(new float[count * columns]);
    norm.compute(arrays[1], reinterpret_cast<const float *>(rows.data()), count, columns,
                 normed.get());
    const toast_vectors vectors = {normed.get(), count, columns, TOAST_F32};
    size_t at = 2;
    for (size_t i = 0; i < packing.size(); i++) {
      const Part part(arrays, at, packing[i], biased[i]);
      mx::array out = arrays[arrays.size() - packing.size() + i];
      part.multiply(vectors, count, nullptr, nullptr, exact, out.data<char>(), TOAST_F32, 0,
                    part.matrix->rows);
    }
  }, lie_by_position);
}

// Heads (B, heads, L, size) as vectors (B * L, heads * size): where they lie so, or else a copy.
class Joined {
 public:
  explicit Joined(const mx::array &a) : data_(a.data<float>()) {
    const int64_t heads = a.shape(1), positions = a.shape(2), size = a.shape(3);
    const bool batches = a.shape(0) == 1 || a.strides(0) == positions * heads * size;
    const bool rows = positions == 1 || a.strides(2) == heads * size;
    if (batches && rows && (heads == 1 || a.strides(1) == size) &&
        (size == 1 || a.strides(3) == 1))
      return;
    copy_.reset(new float[a.size()]);
    float *to = copy_.get();
    for (int64_t b = 0; b < a.shape(0); b++)
      for (int64_t l = 0; l < positions; l++)
        for (int64_t h = 0; h < heads; h++)
          for (int64_t k = 0; k < size; k++)
            *to++ = data_[b * a.strides(0) + h * a.strides(1) + l * a.strides(2) +
                          k * a.strides(3)];
    data_ = copy_.get();
  }
  const float *data() const { return data_; }

 private:
  const float *data_;
  std::unique_ptr<float[]> copy_;
};

// What a layer makes of x (B, L, columns) and of what its attention gave, (B, heads, L, size):
// h = x + out(attended), and with a network (count > 0) h + network(norm(h)); else h, norm(h).
Arrays closed(const mx::array &x, const mx::array &attended, const mx::array &weight, Norm norm,
              const mx::array *const (*parts)[GIVEN], const Packing &packing,
              const Network &network) {
  const bool biased = parts[0][GIVEN - 1];
  check_rows(x, weight);
  check(attended.ndim() == 4 && attended.dtype() == mx::float32 &&
            attended.shape(0) == x.shape(0) && attended.shape(2) == x.shape(1),
        "heads of another shape");
  Arrays inputs = {x, attended, weight};
  add_part(inputs, parts[0], packing, int64_t(attended.shape(1)) * attended.shape(3));
  check(parts[0][0]->shape(-2) == x.shape(-1), "rows of another length");
  if (network.count) {
    add_network(inputs, parts + 1, network, x.shape(-1));
    check(parts[network.count][0]->shape(-2) == x.shape(-1), "rows of another length");
  }
  const size_t outputs = network.count ? 1 : 2;
  return made("ToastClosed", std::vector<mx::Shape>(outputs, x.shape()),
              std::vector<mx::Dtype>(outputs, mx::float32), std::move(inputs),
              [=](const Arrays &arrays) {
    const int64_t columns = arrays[0].shape(-1), count = int64_t(arrays[0].size()) / columns;
    InOrder rows(arrays[0]);
    const Joined heads(arrays[1]);
    size_t at = 3;
    const Part part(arrays, at, packing, biased);
    mx::array out = arrays.back(), first = arrays[arrays.size() - outputs];
    std::unique_ptr<float[]> own(new float[count * columns]);
    float *sum = network.count ? own.get() : first.data<float>();
    const toast_vectors vectors = {heads.data(), count, part.matrix->columns, TOAST_F32};
    part.multiply(vectors, count, nullptr, nullptr, network.exact, sum, TOAST_F32, 0, columns);
    std::vector<uint32_t> each(count);
    std::iota(each.begin(), each.end(), 0);
    auto add = [&](float *to, const void *more) {
      need(toast_add_rows(to, count, columns, static_cast<const float *>(more), count,
                          each.data()));
    };
    add(sum, rows.data());
    norm.compute(arrays[2], sum, count, columns, out.data<float>());
    if (!network.count) return;
    const toast_vectors inner = {out.data<float>(), count, columns, TOAST_F32};
    feed(network, arrays, at, inner, count, nullptr, nullptr, out.data<float>(), TOAST_F32);
    add(out.data<float>(), sum);
  });
}

}  // namespace
}  // namespace toast

extern "C" {

// Make `outs`, arrays that nobody else has, what lies before attention, one for each part, or what
// lies behind it. Lazy. arrays: GIVEN of each of `count` parts. packing: bits and group size of
// each, before attention also its heads. behind: the first part is attention's last product, the
// others a network's; where there are none, outs are two. Return what is wrong; NULL where nothing
// is.
TOAST_API const char *toast_projected_array(void **outs, void *x, void *norm, float eps,
                                            void **arrays, const int *packing, int count,
                                            int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    toast::check(count > 0 && count <= toast::PARTS, "other parts");
    const mx::array *parts[toast::PARTS][toast::GIVEN];
    std::vector<toast::Packing> all;
    std::vector<int> heads;
    for (int i = 0; i < count; i++) {
      all.push_back(toast::given(arrays + toast::GIVEN * i, packing + 3 * i, parts[i]));
      heads.push_back(packing[3 * i + 2]);
    }
    auto made = toast::projected(array_of(x), array_of(norm), {eps}, parts, all, heads, exact != 0);
    for (int i = 0; i < count; i++) array_of(outs[i]) = made[i];
  });
}

TOAST_API const char *toast_closed_array(void **outs, void *x, void *attended, void *norm,
                                         float eps, void **arrays, const int *packing, int count,
                                         int activation, int exact) {
  using toast::array_of;
  return toast::wrong([&] {
    toast::check(count == 1 || count == 3 || count == 4, "other parts");
    const mx::array *parts[1 + toast::PARTS][toast::GIVEN];
    toast::Network network = {count - 1, {}, {}, activation, exact != 0};
    toast::Packing first;
    for (int i = 0; i < count; i++) {
      auto own = toast::given(arrays + toast::GIVEN * i, packing + 2 * i, parts[i]);
      (i ? network.parts[i - 1] : first) = own;
      if (i) network.biased[i - 1] = parts[i][toast::GIVEN - 1];
    }
    auto made = toast::closed(array_of(x), array_of(attended), array_of(norm), {eps}, parts, first,
                              network);
    for (size_t i = 0; i < made.size(); i++) array_of(outs[i]) = made[i];
  });
}

}  // extern "C"
