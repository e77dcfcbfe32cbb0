// The kernels of recurrent.h for one instruction set.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "product.h"
#include "recurrent.h"

namespace {

constexpr int STATE_ROWS = 16;    // per block: a cache line of inputs and outputs per step
constexpr int REGISTER_ROWS = 4;  // of these
constexpr int SCRATCH_ROWS = 5;   // padded copies of a step's vectors

// A delta step of ROWS rows, `stride` apart, from s to `to` (may alias). k, q: zero-padded.
// decay(i): of columns from i on.
template <int ROWS, class Decay>
INLINE void delta_step(const float *s, float *to, int64_t stride, const float *k, const float *q,
                       const float *v, const Decay &decay, float rate, float *y) {
  F32 sums[ROWS] = {};
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 key = load<F32>(k + i), factor = decay(i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      sums[r] = multiply_add(load<F32>(s + r * stride + i) * factor, key, sums[r]);
  }
  F32 change[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    change[r] = splat((v[r] - horizontal_sum(sums[r])) * rate);
    sums[r] = F32{};
  }
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 key = load<F32>(k + i), query = load<F32>(q + i), factor = decay(i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      F32 now = multiply_add(key, change[r], load<F32>(s + r * stride + i) * factor);
      store(to + r * stride + i, now);
      sums[r] = multiply_add(now, query, sums[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) y[r] = horizontal_sum(sums[r]);
}

// A scan step, likewise. b, c: zero-padded. x, y: per row. decay(r, i), dt(r), d(r): of row r and
// columns from i on.
template <int ROWS, class Decay, class Each, class Through>
INLINE void scan_step(const float *s, float *to, int64_t stride, const float *b, const float *c,
                      const float *x, const Decay &decay, const Each &dt, const Through &d,
                      float *y) {
  F32 sums[ROWS] = {}, added[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) added[r] = splat(x[r] * dt(r));
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 in = load<F32>(b + i), out = load<F32>(c + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      F32 now = multiply_add(in, added[r], load<F32>(s + r * stride + i) * decay(r, i));
      store(to + r * stride + i, now);
      sums[r] = multiply_add(now, out, sums[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) y[r] = horizontal_sum(sums[r]) + d(r) * x[r];
}

// An RWKV-7 step, likewise. v, y: per row; r, w, k, a, b: zero-padded.
template <int ROWS>
INLINE void wkv_step(const float *s, float *to, int64_t stride, const float *const (&vectors)[5],
                     const float *v, float *y) {
  const float *const r_ = vectors[0], *const w = vectors[1], *const k = vectors[2];
  const float *const a = vectors[3], *const b = vectors[4];
  F32 sums[ROWS] = {};
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 read = load<F32>(a + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      sums[r] = multiply_add(load<F32>(s + r * stride + i), read, sums[r]);
  }
  F32 found[ROWS], added[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    found[r] = splat(horizontal_sum(sums[r])), added[r] = splat(v[r]);
    sums[r] = F32{};
  }
  for (int64_t i = 0; i < stride; i += LANES) {
    const F32 factor = load<F32>(w + i), key = load<F32>(k + i), back = load<F32>(b + i);
    const F32 out = load<F32>(r_ + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      F32 now = multiply_add(key, added[r], load<F32>(s + r * stride + i) * factor);
      now = multiply_add(back, found[r], now);
      store(to + r * stride + i, now);
      sums[r] = multiply_add(now, out, sums[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) y[r] = horizontal_sum(sums[r]);
}

template <int ROWS>
constexpr int BLOCK_ROWS = ROWS < REGISTER_ROWS ? ROWS : REGISTER_ROWS;

// Calls work(r, x, y) for all rows, a register tile at a time. Inputs and outputs go through local
// copies: memory that aliases modulo the page size (4K aliasing) would make each step wait for the
// one before.
template <int ROWS, class Work>
INLINE void by_register_tiles(const float *x, float *y, const Work &work) {
  float in[ROWS], out[ROWS];
  memcpy(in, x, sizeof in);
  for (int r = 0; r < ROWS; r += BLOCK_ROWS<ROWS>) work(r, in + r, out + r);
  memcpy(y, out, sizeof out);
}

INLINE int64_t state_stride(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// The row itself if it is whole registers, else a zero-padded copy.
INLINE const float *zero_padded(float *buffer, const float *from, int64_t size, int64_t stride) {
  if (size == stride) return from;
  for (int64_t i = 0; i < size; i += LANES)
    store(buffer + i, some_floats_at(TOAST_F32, from, i, int(size - i)));
  return buffer;
}

// Non-temporal stores where the processor has them; visible after stream_fence.
INLINE void stream_row(float *to, const float *from, int64_t count) {
#if defined(__x86_64__)
  int64_t i = 0;
  auto one_by_one = [&](int64_t end) {
    for (int32_t bits; i < end; i++) {
      memcpy(&bits, from + i, sizeof bits);
      _mm_stream_si32(reinterpret_cast<int *>(to + i), bits);
    }
  };
  const int64_t before_line = -(reinterpret_cast<intptr_t>(to) / int64_t(sizeof(float))) & 15;
  one_by_one(before_line < count ? before_line : count);
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#elif defined(__AVX2__)
  for (; i + 8 <= count; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#endif
  for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  one_by_one(count);
#else
  memcpy(to, from, count * sizeof(float));
#endif
}

INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Runs step(t, old rows, new rows, stride, scratch of SCRATCH_ROWS rows) for all steps. Rows of
// whole registers are updated in place.
template <int ROWS, class Step>
INLINE void run_steps(const float *state, float *after, int64_t size, int64_t length,
                      bool streaming, const uint8_t *mask, float *buffer, const Step &step) {
  const int64_t stride = state_stride(size);
  const bool whole = size == stride;
  float *const unused = buffer + (STATE_ROWS + SCRATCH_ROWS) * stride;
  float *const to = whole && !streaming ? after : buffer;
  const float *from = whole && state ? state : to;
  if (!whole || !state) memset(to, 0, ROWS * stride * sizeof(float));
  for (int r = 0; !whole && state && r < ROWS; r++)
    memcpy(buffer + r * stride, state + r * size, size * sizeof(float));
  for (int64_t t = 0; t < length; t++) {
    const bool masked = mask && !mask[t];
    step(t, from, masked ? unused : to, stride, buffer + STATE_ROWS * stride);
    if (!masked) from = to;
  }
  if (from == after) return;
  for (int r = 0; r < ROWS; r++) {
    if (streaming) {
      stream_row(after + r * size, from + r * stride, size);
    } else {
      memcpy(after + r * size, from + r * stride, size * sizeof(float));
    }
  }
}

template <int ROWS>
static void delta_block(const toast::DeltaHead &h, int64_t row, float *buffer) {
  const int64_t size = h.key_size;
  run_steps<ROWS>(
      h.state ? h.state + row * size : nullptr, h.after + row * size, size, h.length, h.streaming,
      h.mask, buffer,
      [&](int64_t t, const float *s, float *to, int64_t stride, float *copies) {
        const float *k = zero_padded(copies, h.k + t * h.key_step, size, stride);
        const float *q = zero_padded(copies + stride, h.q + t * h.key_step, size, stride);
        const float *const decays = h.decays + t * h.gate_step * (h.columns ? size : 1);
        const float rate = h.rates[t * h.gate_step], *v = h.v + t * h.value_step + row;
        float *const out = h.y + t * h.y_step + row;
        auto with = [&](const auto &decay) {
          by_register_tiles<ROWS>(v, out, [&](int r, const float *x, float *y) {
            delta_step<BLOCK_ROWS<ROWS>>(s + r * stride, to + r * stride, stride, k, q, x, decay,
                                         rate, y);
          });
        };
        if (h.columns) {
          const float *own = zero_padded(copies + 2 * stride, decays, size, stride);
          with([&](int64_t i) { return load<F32>(own + i); });
        } else {
          with([&](int64_t) { return splat(*decays); });
        }
      });
}

// Decay rates -exp(a_log) of each element, for rows of a selective scan.
INLINE void decay_rates(const float *a_log, int64_t size, int64_t stride, int rows, float *rates) {
  for (int r = 0; r < rows; r++)
    for (int64_t i = 0; i < stride; i += LANES) {
      const F32 some = some_floats_at(TOAST_F32, a_log + r * size, i, int(size - i));
      store(rates + r * stride + i, -exponential(some));
    }
}

// dt of `rows` <= STATE_ROWS rows.
INLINE void time_steps(const toast::ScanHead &h, const float *dt, int64_t row, int rows,
                       float *to) {
  for (int i = 0; i < rows; i += LANES) {
    F32 some = some_floats_at(TOAST_F32, dt, i, rows - i);
    if (h.bias) some += some_floats_at(TOAST_F32, h.bias + row, i, rows - i);
    store(to + i, minimum(splat(h.most), maximum(splat(h.least), softplus(some))));
  }
}

template <int ROWS>
static void scan_block(const toast::ScanHead &h, int64_t row, float *buffer) {
  const int64_t size = h.state_size, whole = state_stride(size);
  float *const rates = buffer + (2 * STATE_ROWS + SCRATCH_ROWS) * whole;
  if (h.a_log) decay_rates(h.a_log + row * size, size, whole, ROWS, rates);
  run_steps<ROWS>(
      h.state ? h.state + row * size : nullptr, h.after + row * size, size, h.length, h.streaming,
      h.mask, buffer,
      [&](int64_t t, const float *s, float *to, int64_t stride, float *copies) {
        const float *b = zero_padded(copies, h.b + t * h.group_step, size, stride);
        const float *c = zero_padded(copies + stride, h.c + t * h.group_step, size, stride);
        const int64_t at = t * h.x_step + row;
        auto with = [&](const auto &decay, const auto &dt, const auto &d) {
          by_register_tiles<ROWS>(h.x + at, h.y + at, [&](int r, const float *x, float *y) {
            scan_step<BLOCK_ROWS<ROWS>>(
                s + r * stride, to + r * stride, stride, b, c, x,
                [&](int k, int64_t i) { return decay(r + k, i); },
                [&](int k) { return dt(r + k); }, [&](int k) { return d(r + k); }, y);
          });
        };
        if (h.a_log) {
          alignas(64) float dts[STATE_ROWS];
          time_steps(h, h.dt + at, row, ROWS, dts);
          with([&](int r, int64_t i) {
                 return exponential(load<F32>(rates + r * stride + i) * dts[r]);
               },
               [&](int r) { return dts[r]; }, [&](int r) { return h.d[row + r]; });
        } else {
          const float factor = h.decays[t * h.gate_step], each = h.dt[t * h.gate_step];
          with([&](int, int64_t) { return splat(factor); }, [&](int) { return each; },
               [&](int) { return *h.d; });
        }
      });
}

template <int ROWS>
static void wkv_block(const toast::WkvHead &h, int64_t row, float *buffer) {
  const int64_t size = h.size;
  run_steps<ROWS>(
      h.state ? h.state + row * size : nullptr, h.after + row * size, size, h.length, h.streaming,
      nullptr, buffer,
      [&](int64_t t, const float *s, float *to, int64_t stride, float *copies) {
        const float *vectors[] = {h.r, h.w, h.k, h.a, h.b};
        for (int i = 0; i < 5; i++)
          vectors[i] = zero_padded(copies + i * stride, vectors[i] + t * h.step, size, stride);
        const int64_t at = t * h.step + row;
        by_register_tiles<ROWS>(h.v + at, h.y + at, [&](int r, const float *v, float *y) {
          wkv_step<BLOCK_ROWS<ROWS>>(s + r * stride, to + r * stride, stride, vectors, v, y);
        });
      });
}

template <class Block, class One>
INLINE bool by_blocks(int64_t size, bool streaming, int64_t first, int64_t end, const Block &block,
                      const One &one) {
  const int64_t bytes =
      (3 * STATE_ROWS + SCRATCH_ROWS) * state_stride(size) * int64_t(sizeof(float));
  auto buffer = static_cast<float *>(toast::scratch(toast::ROWS, bytes));
  if (!buffer) return false;
  int64_t row = first;
  for (; row + STATE_ROWS <= end; row += STATE_ROWS) block(row, buffer);
  for (; row < end; row++) one(row, buffer);
  if (streaming) stream_fence();
  return true;
}

static bool delta_rows(const toast::DeltaHead &h, int64_t first, int64_t end) {
  return by_blocks(
      h.key_size, h.streaming, first, end,
      [&](int64_t row, float *buffer) { delta_block<STATE_ROWS>(h, row, buffer); },
      [&](int64_t row, float *buffer) { delta_block<1>(h, row, buffer); });
}

static bool scan_rows(const toast::ScanHead &h, int64_t first, int64_t end) {
  return by_blocks(
      h.state_size, h.streaming, first, end,
      [&](int64_t row, float *buffer) { scan_block<STATE_ROWS>(h, row, buffer); },
      [&](int64_t row, float *buffer) { scan_block<1>(h, row, buffer); });
}

static bool wkv_rows(const toast::WkvHead &h, int64_t first, int64_t end) {
  return by_blocks(
      h.size, h.streaming, first, end,
      [&](int64_t row, float *buffer) { wkv_block<STATE_ROWS>(h, row, buffer); },
      [&](int64_t row, float *buffer) { wkv_block<1>(h, row, buffer); });
}

static void column_decays(const float *a, const float *bias, float a_log, int64_t count,
                          float *out) {
  const F32 rate = -exponential(splat(a_log));
  for (int64_t i = 0; i < count; i += LANES) {
    const int lanes = int(count - i < LANES ? count - i : LANES);
    const F32 x = some_floats_at(TOAST_F32, a, i, lanes) +
                  some_floats_at(TOAST_F32, bias, i, lanes);
    put_some(TOAST_F32, out, i, exponential(rate * softplus(x)), lanes);
  }
}

// Channels [first, end) of one batch.
static void linear_rows(const toast_linear &l, int64_t batch, int64_t first, int64_t end,
                        float *h) {
  for (int64_t i = first; i < end; i += LANES) {
    const int lanes = int(end - i < LANES ? end - i : LANES);
    F32 now = {};
    if (l.state) now = some_floats_at(TOAST_F32, l.state + batch * l.channels, i, lanes);
    for (int64_t t = 0; t < l.length; t++) {
      const int64_t at = (batch * l.length + t) * l.channels;
      const F32 factor = some_floats_at(TOAST_F32, l.decays + at, i, lanes);
      now = multiply_add(factor, now, some_floats_at(TOAST_F32, l.x + at, i, lanes));
      put_some(TOAST_F32, h + at, i, now, lanes);
    }
  }
}

}  // namespace
