// GEMM: weights are unpacked and transposed once, 16 rows to a register, and meet all vectors of a
// batch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "digit_rows.h"
#include "floats.h"

namespace {

constexpr int TILE_ROWS = 4;            // of 16 rows each
// Columns multiplied at a time, to stay in L1; packed ones take half the room.
constexpr int64_t BLOCK_COLUMNS = 256, MAX_BLOCK_COLUMNS = 512;

// A group of weights of 16 * N rows, transposed, and where its activations are.
struct TransposedGroup {
  const char *weights;           // (planes, lanes, N, 16 rows, 4) bytes; pairs: (BYTE_PLANES, ...)
  const float *scales, *biases;  // (N, 16 rows)
  const int32_t *offsets;        // (planes, lanes): from `digits` to the upper digits of a lane
  int64_t words, lower;          // words per row (packed bytes: lanes); from upper to lower digits
  int64_t digits, step, total;   // byte offsets in a prepared vector
};

// What is transposed for pairs: packed bytes, unpacked when vectors meet them; AMX needs all three.
#if defined(__AMX_INT8__)
constexpr int BYTE_PLANES = 3;            // both planes and packed bytes
constexpr int MIN_TILE_ROWS = TILE_ROWS;  // double-buffered accumulators need four
#else
constexpr int BYTE_PLANES = 1;
constexpr int MIN_TILE_ROWS = 1;  // for the last rows
#endif
template <class B>
constexpr int STORED = B::PAIRED ? BYTE_PLANES : B::PLANES;

// Columns that are transposed at a time: fewer of 4 bits beside AMX, which is faster; on Zen 4 more
// packed ones gain nothing.
template <class B>
INLINE int64_t block_columns() {
  if (BYTE_PLANES > 2) return B::PLANES == 2 ? BLOCK_COLUMNS / 2 : BLOCK_COLUMNS;
  return B::PAIRED && !toast::is_zen4 ? MAX_BLOCK_COLUMNS : BLOCK_COLUMNS;
}

// Prefetches a part of each of some rows. go_on: to the next row where one is done.
struct PartPrefetcher : Prefetcher {
  const uint8_t *end;
  int64_t width, stride;  // of a part, and from one to the next
  static PartPrefetcher over(const uint8_t *from, int64_t width, int64_t stride, int64_t rows,
                             int64_t steps) {
    if (width == stride) width = stride = width * rows, rows = 1;
    const int64_t bytes = (width + 64) * rows;  // a part is done where the step ends
    return {{from, bytes / std::max<int64_t>(steps, 1) + 1}, from + width, width, stride};
  }
  void go_on() {
    if (at >= end) end += stride, at = end - width;
  }
};

// Passes over the rows: two vectors each.
INLINE int passes_of(int64_t batch) { return int(batch + 1) / 2; }

}  // namespace

#if defined(__AMX_INT8__)
#include "amx_tiles.h"
#endif

namespace {

#if !defined(__AMX_INT8__)

// Adds a group's integer sums for M vectors and 16 * N rows. per_step: prefetch at every step.
template <int M, int N, bool PAIRED>
INLINE void add_products(const TransposedGroup &c, const char *const *vectors, bool per_step,
                         Prefetcher &next, I32 (&upper)[M][N], I32 (&lower)[M][N]) {
  const char *digits[M], *weights = c.weights;
  for (int i = 0; i < M; i++) digits[i] = vectors[i] + c.digits;
  auto add = [&](I32 (&sums)[M][N], const I32 *rows, int64_t place) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      int32_t four;
      memcpy(&four, digits[i] + place, 4);
      const I32 all = I32{} + four;
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) add_dpbusd(sums[i][j], rows[j], all);
    }
  };
  auto multiply = [&](I32 (&sums)[M][N], int64_t place,
                      auto &&unpack) __attribute__((always_inline)) {
    I32 rows[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) rows[j] = unpack(load<I32>(weights + j * 64));
    add(sums, rows, place);
  };
  for (int64_t at = 0; at < c.words; at++, weights += 64 * N) {
    if (per_step) next.fetch(1);
    if constexpr (PAIRED) {
      multiply(upper, at * 4, [](I32 q) { return q & 0x0f0f0f0f; });
      multiply(upper, (c.words + at) * 4, [](I32 q) { return (I32)((U32)q >> 4) & 0x0f0f0f0f; });
      multiply(lower, c.lower + at * 4, [](I32 q) { return q; });
    } else {
      I32 rows[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) rows[j] = load<I32>(weights + j * 64);
      add(upper, rows, c.offsets[at]);
      add(lower, rows, c.offsets[at] + c.lower);
    }
  }
}

// Adds `count` groups to y[i][j] of M vectors and 16 * N rows. M = 2, N = 4: 16 accumulators and 8
// results all stay in registers, so a group is scaled while the next one is begun.
template <int M, int N, bool PAIRED>
static __attribute__((noinline)) void digit_tile(const TransposedGroup *groups, int64_t count,
                                                 const char *const *vectors, float *y,
                                                 Prefetcher &ahead) {
  F32 results[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M * N; i++) results[i / N][i % N] = load<F32>(y + i * 16);
  Prefetcher next = ahead;
  const bool per_step = next.pace >= 64;  // lines at every step, or a few at the end
  for (const TransposedGroup *c = groups; c < groups + count; c++) {
    I32 upper[M][N], lower[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M * N; i++) upper[i / N][i % N] = lower[i / N][i % N] = I32{};
    add_products<M, N, PAIRED>(*c, vectors, per_step, next, upper, lower);
    if (!per_step) next.fetch(c->words);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      auto step = reinterpret_cast<const float *>(vectors[i] + c->step);
      auto total = reinterpret_cast<const float *>(vectors[i] + c->total);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++)
        results[i][j] =
            add_group(results[i][j], upper[i][j] * 256 + lower[i][j],
                      load<F32>(c->scales + j * 16), load<F32>(c->biases + j * 16), step, total);
    }
  }
  ahead = next;
#pragma GCC unroll 8
  for (int i = 0; i < M * N; i++) store(y + i * 16, results[i / N][i % N]);
}

struct Tiles {
  const char *const *vectors;
  int64_t batch;
  Tiles(const char *const *vectors, int64_t batch, int, bool)
      : vectors(vectors), batch(batch) {}

  // Adds `count` groups to y[i][j] of all vectors and 16 * N rows.
  template <int N, bool PAIRED>
  void add(const TransposedGroup *groups, int64_t count, float *y, PartPrefetcher &ahead) const {
    int64_t i = 0;
    for (; batch - i > 1; i += 2, ahead.go_on())
      digit_tile<2, N, PAIRED>(groups, count, vectors + i, y + i * N * 16, ahead);
    if (i < batch) digit_tile<1, N, PAIRED>(groups, count, vectors + i, y + i * N * 16, ahead);
  }
};

#endif

// Byte offsets of digits and transposed weights within a group.
struct Offsets {
  int32_t digits[32];   // (planes, lanes), from the group's first upper digit
  int32_t weights[64];  // (planes, 16 lanes) of a block
  INLINE Offsets of(const Layout &layout, int planes, int n) {
    Offsets offsets;
    for (int i = 0; i < layout.lanes * layout.planes; i++)
      offsets.digits[i] = int32_t(layout.offset(i * 4));
    const int lanes = std::min(layout.lanes, 16);
    for (int i = 0; i < 16 * planes; i++) {
      const int lane = i % 16, plane = i / 16, plane_group = lane / lanes * planes + plane;
      offsets.weights[i] = (plane_group * lanes + lane % lanes) * n * 64;
    }
    return offsets;
  }
};

// Transposes blocks of 16 * N rows. left: bytes of a row from `block` on. Packed bytes are unpacked
// after transposing: half the work, or a quarter.
template <class B, int N>
static __attribute__((noinline)) void transpose_blocks(const uint8_t *const *rows, int64_t block,
                                                       int64_t blocks, int64_t left,
                                                       const Offsets &offsets, char *out) {
  for (int64_t b = 0; b < blocks; b++, out += STORED<B> * 16 * N * 64) {
    for (int j = 0; j < N; j++) {
      I32 words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const uint8_t *at = rows[j * 16 + i] + (block + b) * B::BYTES;
        const __m512i stored = B::load(at, left - b * B::BYTES);
        if constexpr (B::PLANES == 1) {
          B::unpack(stored, &words[i]);
        } else {
          words[i] = (I32)stored;
        }
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        I32 q[STORED<B>] = {words[i]};
        if constexpr (STORED<B> > 1) B::unpack((__m512i)words[i], q);
        if constexpr (STORED<B> > B::PLANES) q[B::PLANES] = words[i];
#pragma GCC unroll 4
        for (int k = 0; k < STORED<B>; k++)
          store(out + (STORED<B> > 1 ? offsets.weights[k * 16 + i] : i * N * 64) + j * 64, q[k]);
      }
    }
  }
}

}  // namespace
