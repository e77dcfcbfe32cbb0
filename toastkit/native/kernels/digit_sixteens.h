// GEMM of pairs, 16 vectors at a time: they lie side by side in registers, and weights are
// broadcast to them as stored, so that nothing but vectors is transposed.
#pragma once

#include "digit_tiles.h"

namespace {

constexpr int SIXTEEN = 16;      // vectors side by side
constexpr int SHARING_ROWS = 4;  // that meet digits while these are in registers
constexpr int PARTS = 3;         // of digits: those that meet low codes, high codes, and both
constexpr int64_t SCALE_STRIDE = 32;  // 16 scales of a row, then their biases

// Where the parts of 16 vectors' digits are: for each four bytes of a row (four digits of each
// vector), three registers. Then, for each group, d of all vectors and d * sum of v.
struct Sixteen {
  int64_t group_bytes, steps, bytes;
  INLINE Sixteen of(const Layout &l) {
    const int64_t group = l.lanes * PARTS * 64, steps = l.groups * group;
    return {group, steps, steps + (l.groups + 15) / 16 * 16 * 128};
  }
};

// Stores up to 16 vectors so; missing ones repeat the last.
static __attribute__((noinline)) void interleave(const toast::Product &p, const uint32_t *outputs,
                                                 int64_t count, const Layout &l, char *out) {
  const int64_t steps = Sixteen::of(l).steps;
  const char *from[SIXTEEN];
  for (int i = 0; i < SIXTEEN; i++)
    from[i] = digits_of(p, outputs[std::min<int64_t>(i, count - 1)]);
  auto transposed = [&](int64_t at, I32 (&r)[SIXTEEN]) {
#pragma GCC unroll 16
    for (int i = 0; i < SIXTEEN; i++) r[i] = load<I32>(from[i] + at);
    transpose(r);
  };
  for (int64_t b = 0; b < l.blocks; b++)
    for (int part = 0; part < PARTS; part++) {
      I32 r[SIXTEEN];
      transposed(b * l.digits + part * BLOCK, r);
      for (int i = 0; i < 16; i++) {
        // Upper digits lie in the order (group, codes, lane).
        const int upper = part * 16 + i, codes = part == 2 ? 2 : upper / l.lanes % 2;
        const int lane = part == 2 ? i : upper / l.lanes / 2 * l.lanes + upper % l.lanes;
        char *to = out + ((b * 16 + lane) * PARTS + codes) * 64;
        if (to < out + steps) store(to, r[i]);
      }
    }
  for (int64_t g = 0; g < l.groups; g += 16)
    for (int total = 0; total < 2; total++) {
      I32 r[SIXTEEN];
      transposed((total ? l.sums : l.steps) + g * 4, r);
      for (int i = 0; i < 16; i++) store(out + steps + ((g + i) * 2 + total) * 64, r[i]);
    }
}

INLINE int64_t sixteens(int64_t batch) { return (batch + SIXTEEN - 1) / SIXTEEN; }

// A batch's vectors, interleaved once by each thread. NULL if out of memory.
static const char *interleaved(const toast::Product &p, const toast::ExpertBatch &batch,
                               const Layout &l) {
  const int64_t bytes = Sixteen::of(l).bytes;
  bool known;
  auto memory = static_cast<char *>(toast::scratch_of(batch, sixteens(batch.size) * bytes, &known));
  for (int64_t i = 0; memory && !known && i < batch.size; i += SIXTEEN)
    interleave(p, batch.outputs + i, std::min<int64_t>(batch.size - i, SIXTEEN), l,
               memory + i / SIXTEEN * bytes);
  return memory;
}

// Scales or biases of 16 groups from `at` on; beyond the `left` that there are, zeros. Masked: what
// memcpy has copied cannot be loaded at once (half the time of narrow matrices).
INLINE F32 scales_of_row(const toast_matrix &m, const void *numbers, int64_t at, int64_t left) {
  const __mmask16 valid = __mmask16(left < LANES ? (1u << left) - 1 : 0xffff);
  if (m.type == TOAST_F32)
    return (F32)_mm512_maskz_loadu_ps(valid, static_cast<const float *>(numbers) + at);
  const U16 v = (U16)_mm256_maskz_loadu_epi16(valid, static_cast<const uint16_t *>(numbers) + at);
  return m.type == TOAST_F16 ? Dtype<TOAST_F16>::wide(v) : Dtype<TOAST_BF16>::wide(v);
}

// Four bytes of a row, eight codes, for all vectors. One load: GCC would broadcast codes masked
// before, from a general register.
INLINE I32 broadcast(const uint8_t *at) {
  __m512i all;
  asm("vpbroadcastd %1, %0" : "=v"(all) : "m"(*reinterpret_cast<const uint32_t *>(at)));
  return (I32)all;
}

// Adds `groups` groups to y (4 rows, 16 vectors). rows: those, then the next ones, whose same bytes
// are prefetched; at: of the first group in a row. digits, steps: see Sixteen. scales: (4,
// SCALE_STRIDE).
static __attribute__((noinline)) void multiply_sixteen(const uint8_t *const *rows, int64_t at,
                                                       int64_t lanes, int64_t groups,
                                                       const char *digits, const char *steps,
                                                       const float *scales, float *y,
                                                       Prefetcher &ahead) {
  constexpr int N = SHARING_ROWS;
  const uint8_t *codes[N] = {rows[0], rows[1], rows[2], rows[3]};
  F32 results[N];
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) results[j] = load<F32>(y + j * SIXTEEN);
  Prefetcher next = ahead;
  for (int64_t g = 0; g < groups; g++, steps += 128) {
    next.fetch(1);
    for (int64_t j = g % 2; j < N; j += 2)  // a line is at least two groups
      __builtin_prefetch(rows[N + j] + at, 0, 3);
    I32 low[N] = {}, high[N] = {}, both[N] = {};
    for (const int64_t end = at + lanes * 4; at < end; at += 4, digits += PARTS * 64) {
      const I32 of_low = load<I32>(digits), of_high = load<I32>(digits + 64);
      const I32 of_both = load<I32>(digits + 128);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) {
        const I32 q = broadcast(codes[j] + at);
        add_dpbusd(low[j], q & 0x0f0f0f0f, of_low);
        add_dpbusd(high[j], q & int(0xf0f0f0f0), of_high);  // sixteen times the sum
        add_dpbusd(both[j], q, of_both);
      }
    }
    const F32 step = load<F32>(steps), total = load<F32>(steps + 64);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      const F32 sum = __builtin_convertvector((low[j] * 16 + high[j]) * 16 + both[j], F32);
      const float *scale = scales + g + j * SCALE_STRIDE;
      results[j] = multiply_add(sum, splat(scale[0]) * step, results[j]);  // see add_group
      results[j] = multiply_add(splat(scale[16]), total, results[j]);
    }
  }
  ahead = next;
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) store(y + j * SIXTEEN, results[j]);
}

}  // namespace
