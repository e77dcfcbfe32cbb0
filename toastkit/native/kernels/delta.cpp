// The C interface of delta.h, and how rows of states are shared out among the threads.
#include "delta.h"

#include <math.h>

#include <atomic>

#include "product.h"
#include "sharing.h"

namespace toast {
namespace {

float softplus(float x) { return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x))); }

int compute(const toast_delta &d, float *y, float *after) {
  const int64_t gates = d.batch * d.length * d.value_heads, heads = d.batch * d.value_heads;
  auto decays = memory<float>(gates), rates = memory<float>(gates);
  if (!decays || !rates) return 2;
  share(gates, 16, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t h = i % d.value_heads;
      decays[i] = expf(-expf(d.a_log[h]) * softplus(d.a[i] + d.bias[h]));
      rates[i] = d.rate_factor / (1 + expf(-d.b[i]));
    }
  });
  const Delta delta = {&d, decays.get(), rates.get(), y, after};
  const auto rows = instructions().rows->delta;
  std::atomic<bool> failed{false};
  // The rows of all heads, one after another; a chunk may end in the midst of a head.
  share(heads * d.value_size, d.key_size * (d.length + 1), [&](int64_t first, int64_t end) {
    while (first < end) {
      const int64_t head = first / d.value_size, row = first % d.value_size;
      const int64_t some = d.value_size - row < end - first ? d.value_size - row : end - first;
      if (!rows(delta, head, row, row + some)) failed.store(true, std::memory_order_relaxed);
      first += some;
    }
  });
  return failed.load(std::memory_order_relaxed) ? 2 : 0;
}

}  // namespace
}  // namespace toast

extern "C" int toast_gated_delta(const toast_delta *delta, float *y, float *after) {
  const toast_delta &d = *delta;
  if (d.key_heads <= 0 || d.value_heads % d.key_heads || d.key_size <= 0) return 1;
  return toast::compute(d, y, after);
}
