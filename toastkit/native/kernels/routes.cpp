// How routers choose experts: the C interface of rows.h for it.
#include <math.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "product.h"
#include "rows.h"
#include "sharing.h"

namespace toast {
namespace {

// Scores for choosing, without bias, float32 (count, columns): see toast_choice.
int scores_of(const toast_vectors &x, int64_t columns, int32_t how, float *out) {
  if (!(how & (TOAST_CHOSEN | TOAST_SCORED))) return toast_softmax(&x, columns, out, TOAST_F32);
  const RowInstructions &code = *instructions().rows;
  for (int64_t row = 0; row < x.count; row++)  // exact in float32
    code.store(x.type, x.data, row * x.stride, columns, out, TOAST_F32, row * columns);
  if (how & TOAST_SCORED)
    code.gate({out, nullptr, TOAST_F32, TOAST_SIGMOID, out}, 0, x.count * columns);
  return 0;
}

// Zeros the elements of groups that are not kept; of equal groups the first goes.
void drop_groups(const toast_choice &choice, int64_t columns, float *numbers) {
  const int64_t size = columns / choice.groups;
  auto score = [&](int64_t group) {
    const float *scores = numbers + group * size;
    float best = -INFINITY, next = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
      if (scores[i] > next) next = std::min(best, scores[i]);
      if (scores[i] > best) best = scores[i];
    }
    const float two = best + next;
    return choice.how & TOAST_BEST || size == 1 || two != two ? best : two;
  };
  std::vector<std::pair<float, int64_t>> groups;
  for (int64_t group = 0; group < choice.groups; group++) groups.push_back({score(group), group});
  std::sort(groups.begin(), groups.end());
  for (int64_t i = 0; i < choice.groups - choice.kept; i++)
    std::fill_n(numbers + groups[i].second * size, size, 0.0f);
}

// SparseMixer's choice for each row, see toast_choice. Returns 2 if out of memory.
int mix_sparsely(const toast_vectors &x, int64_t columns, const toast_choice &choice,
                 uint32_t *which, float *shares) {
  auto left = memory<float>(columns), near = memory<float>(columns);
  if (!left || !near) return 2;
  const toast_vectors one = {near.get(), 1, columns, TOAST_F32};
  for (int64_t i = 0; i < x.count * choice.chosen; i++) {
    const float *logits = static_cast<const float *>(x.data) + i / choice.chosen * x.stride;
    if (i % choice.chosen == 0) std::copy_n(logits, columns, left.get());
    const int64_t at = std::max_element(left.get(), left.get() + columns) - left.get();
    const float top = left[at];
    for (int64_t c = 0; c < columns; c++) {
      const bool far = (top - logits[c]) / std::max(std::fabs(logits[c]), top) > choice.eps;
      near[c] = far ? -INFINITY : left[c];
    }
    if (int code = toast_softmax(&one, columns, near.get(), TOAST_F32)) return code;
    which[i] = uint32_t(at), shares[i] = near[at] * choice.factor;
    left[at] = -INFINITY;
  }
  return 0;
}

}  // namespace
}  // namespace toast

extern "C" {

int toast_route(const toast_vectors *x, int64_t columns, const toast_choice *choice,
                const float *bias, uint32_t *which, float *shares) {
  const int64_t count = x->count, all = count * columns, k = choice->chosen;
  const bool ahead = choice->how & TOAST_AHEAD, chosen = choice->how & TOAST_CHOSEN;
  const bool best = choice->how & TOAST_BEST, sparse = choice->how & TOAST_SPARSE;
  if (x->type < TOAST_F32 || x->type > TOAST_BF16) return 1;
  if (k <= 0 || k > columns || columns > UINT32_MAX) return 1;
  if ((chosen || sparse) && x->type != TOAST_F32) return 1;
  if (choice->groups > 0 && (columns % choice->groups || choice->kept < 0)) return 1;
  if (sparse && (choice->how != TOAST_SPARSE || choice->groups > 0 || bias)) return 1;
  if (sparse) return toast::mix_sparsely(*x, columns, *choice, which, shares);
  auto scores = toast::memory<float>(all), by = toast::memory<float>(all);
  auto order = toast::memory<uint32_t>(all);
  if (!scores || !by || !order) return 2;
  if (int code = toast::scores_of(*x, columns, choice->how, scores.get())) return code;
  auto drop = [&](float *numbers) {
    for (int64_t row = 0; choice->groups > 1 && row < count; row++)
      toast::drop_groups(*choice, columns, numbers + row * columns);
  };
  if (best) drop(scores.get());
  for (int64_t i = 0; i < all; i++) by[i] = scores[i] + (bias ? bias[i % columns] : 0);
  if (!best) drop(by.get());
  for (int64_t i = 0; ahead && i < all; i++) by[i] = -by[i];
  const toast_vectors rows = {by.get(), count, columns, TOAST_F32};
  if (int code = toast_partition(&rows, columns, ahead ? k - 1 : columns - k, order.get()))
    return code;
  for (int64_t row = 0; row < count; row++) {
    const uint32_t *own = &order[row * columns + (ahead ? 0 : columns - k)];
    float total = 0;
    for (int64_t i = row * k; i < (row + 1) * k; i++) {
      which[i] = *own++;
      total += shares[i] = scores[row * columns + which[i]];
    }
    if (chosen) continue;
    for (int64_t i = row * k; i < (row + 1) * k; i++)
      shares[i] = (choice->how & TOAST_NORMED ? shares[i] / (total + choice->eps) : shares[i]) *
                  choice->factor;
  }
  const toast_vectors found = {shares, count, k, TOAST_F32};
  return chosen ? toast_softmax(&found, k, shares, TOAST_F32) : 0;
}

}  // extern "C"
