// The code of delta.h for one instruction set.
#pragma once

#include "delta.h"
#include "lanes.h"
#include "product.h"

namespace {

constexpr int DELTA_ROWS = 4;  // at a time

// One step of some rows, which lie `stride` numbers apart. k, q: zeros from key_size on.
template <int ROWS>
INLINE void delta_step(float *s, int64_t stride, const float *k, const float *q, const float *v,
                       float decay, float rate, float *y) {
  F32 sums[ROWS] = {};
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 key = load<F32>(k + i);
    for (int r = 0; r < ROWS; r++) {
      F32 kept = load<F32>(s + r * stride + i) * decay;
      store(s + r * stride + i, kept);
      sums[r] = multiply_add(kept, key, sums[r]);
    }
  }
  F32 change[ROWS];
  for (int r = 0; r < ROWS; r++) {
    change[r] = all((v[r] - sum(sums[r])) * rate);
    sums[r] = F32{};
  }
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 key = load<F32>(k + i), query = load<F32>(q + i);
    for (int r = 0; r < ROWS; r++) {
      F32 now = multiply_add(key, change[r], load<F32>(s + r * stride + i));
      store(s + r * stride + i, now);
      sums[r] = multiply_add(now, query, sums[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) y[r] = sum(sums[r]);
}

// Zeros behind it, up to whole registers.
INLINE void copy_row(float *to, const float *from, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES)
    store(to + i, some_numbers_at(TOAST_F32, from, i, int(size - i)));
}

template <int ROWS>
static void delta_block(const toast::Delta &d, int64_t head, int64_t row, float *room) {
  const toast_delta &of = *d.of;
  const int64_t size = of.key_size, stride = (size + LANES - 1) / LANES * LANES;
  const int64_t b = head / of.value_heads, h = head % of.value_heads;
  const int64_t key_head = h / (of.value_heads / of.key_heads);
  float *s = room, *k = room + DELTA_ROWS * stride, *q = k + stride, *before = q + stride;
  const int64_t start = (head * of.value_size + row) * size;
  for (int r = 0; r < ROWS; r++) {
    if (of.state) {
      copy_row(s + r * stride, of.state + start + r * size, size);
    } else {
      memset(s + r * stride, 0, stride * sizeof(float));
    }
  }
  for (int64_t t = 0; t < of.length; t++) {
    const int64_t step = b * of.length + t, gate = step * of.value_heads + h;
    const int64_t key = (step * of.key_heads + key_head) * size;
    const bool passing = of.mask && !of.mask[step];
    if (passing) memcpy(before, s, ROWS * stride * sizeof(float));
    copy_row(k, of.k + key, size);
    copy_row(q, of.q + key, size);
    const int64_t value = gate * of.value_size + row;
    delta_step<ROWS>(s, stride, k, q, of.v + value, d.decays[gate], d.rates[gate], d.y + value);
    if (passing) memcpy(s, before, ROWS * stride * sizeof(float));
  }
  for (int r = 0; r < ROWS; r++)
    memcpy(d.after + start + r * size, s + r * stride, size * sizeof(float));
}

static bool delta_rows(const toast::Delta &d, int64_t head, int64_t first, int64_t end) {
  const int64_t stride = (d.of->key_size + LANES - 1) / LANES * LANES;
  const int64_t bytes = (2 * DELTA_ROWS + 2) * stride * int64_t(sizeof(float));
  auto room = static_cast<float *>(toast::scratch(toast::ROWS, bytes));
  if (!room) return false;
  int64_t row = first;
  for (; row + DELTA_ROWS <= end; row += DELTA_ROWS) delta_block<DELTA_ROWS>(d, head, row, room);
  for (; row < end; row++) delta_block<1>(d, head, row, room);
  return true;
}

}  // namespace
