// GEMM: weights are unpacked and transposed once, 16 rows to a register, and meet all vectors of a
// batch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "digit_rows.h"
#include "floats.h"

namespace {

constexpr int TILE_ROWS = 4;            // of 16 rows each
constexpr int64_t BLOCK_COLUMNS = 256;  // transposed at a time, to stay in L1

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
  void add(const TransposedGroup *groups, int64_t count, float *y, Prefetcher &ahead) const {
    int64_t i = 0;
    for (; batch - i > 1; i += 2)
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
        for (int k = 0; k < STORED<B>; k++) store(out + offsets.weights[k * 16 + i] + j * 64, q[k]);
      }
    }
  }
}

// All vectors of a batch times up to 16 * N rows. ahead, next_row: as in digit_rows.
template <class B, int N>
static void multiply_many(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                          int count, const uint8_t *rows, int64_t stride, const uint8_t *ahead,
                          int64_t next_row, char *buffer) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(p);
  const auto offsets = Offsets::of(layout, STORED<B>, N);
  const char *vectors[toast::MAX_BATCH];
  const uint8_t *row_pointers[16 * N];  // missing ones repeat the last
  for (int i = 0; i < batch.size; i++) vectors[i] = digits_of(p, batch.outputs[i]);
  for (int i = 0; i < 16 * N; i++) row_pointers[i] = rows + std::min(i, count - 1) * stride;
  float *y = reinterpret_cast<float *>(buffer), *scales = y + toast::MAX_BATCH * N * 16;
  float *biases = scales + 16 * N * 16;
  char *weights = reinterpret_cast<char *>(biases + 16 * N * 16);
  memset(y, 0, batch.size * N * 64);
  Tiles tiles(vectors, batch.size, m.group_size, B::PAIRED);
  const int64_t words = layout.lanes * std::min(STORED<B>, B::PLANES), size = sizeof(float);
  const bool half = BYTE_PLANES > 2 && B::PLANES == 2;  // faster beside AMX, with 4 bits
  const int64_t block_groups = BLOCK_COLUMNS / (half ? 2 : 1) / m.group_size;
  const int64_t bytes = m.group_size * B::BYTES / layout.weights;  // of a group of one row
  Prefetcher next = {ahead, 16 * N * bytes / (words * passes_of(batch.size)) + 1};
  auto next_scales = ScalePrefetcher::of(m, next_row, 16 * N);
  for (int64_t g = 0; g < layout.groups; g += block_groups) {
    const int64_t end = std::min(layout.groups, g + block_groups);
    const int64_t block = g * m.group_size / layout.weights;
    const int64_t blocks = (end * m.group_size + layout.weights - 1) / layout.weights - block;
    transpose_blocks<B, N>(row_pointers, block, blocks, (layout.groups - g) * bytes, offsets,
                           weights);
    for (int j = 0; j < N && g % 16 == 0; j++) {
      const int64_t row = batch.expert * m.rows + first + std::min(j * 16, count - 1);
      F32 r[2][16];
      scales_by_group(m, row, std::clamp(count - j * 16, 1, 16), g, r[0], r[1]);
      for (int64_t l = 0; l < 16; l++) {
        store(scales + (l * N + j) * 16, r[0][l]);
        store(biases + (l * N + j) * 16, r[1][l]);
      }
    }
    TransposedGroup groups[BLOCK_COLUMNS / 32];
    for (int64_t at = g; at < end; at++) {
      next_scales.fetch();
      groups[at - g] = {
          weights + (at - g) * layout.lanes * STORED<B> * N * 64, scales + at % 16 * N * 16,
          biases + at % 16 * N * 16, offsets.digits, words, layout.lower(at * m.group_size),
          layout.offset(at * m.group_size), layout.steps + at * size, layout.sums + at * size};
    }
    tiles.add<N, B::PAIRED>(groups, end - g, y, next);
  }
  for (int i = 0; i < batch.size; i++)
    for (int j = 0; j * 16 < count; j++)
      store_rows(p, batch.outputs[i], first + j * 16, std::min(count - j * 16, 16),
                 load<F32>(y + (i * N + j) * 16));
}

constexpr int64_t BUFFER_BYTES =
    (toast::MAX_BATCH * 64 + 2 * 16 * 64 + BLOCK_COLUMNS * 16) * TILE_ROWS;

// Largest batch that takes digit_rows: fewer where unpacking is expensive, and on Zen 4. None with
// AMX: amx_int8.cpp sends small batches elsewhere.
#if defined(__AMX_INT8__)
template <class B>
constexpr int MAX_FEW = 0;
#else
template <class B>
constexpr int MAX_FEW = B::BYTES == BLOCK && B::PLANES < 4 ? 5 : 3;
#endif

template <class B>
INLINE int max_few() {
  return toast::is_zen4 ? std::min(MAX_FEW<B>, B::BYTES == BLOCK ? 3 : 2) : MAX_FEW<B>;
}

// A batch of M vectors at most times up to 16 rows. ahead, next_row: as in digit_rows.
template <class B, int M>
static void multiply_few(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                         int count, const uint8_t *rows, int64_t stride, const uint8_t *ahead,
                         int64_t next_row) {
  if constexpr (M > 1)
    if (batch.size < M)
      return multiply_few<B, M - 1>(p, batch, first, count, rows, stride, ahead, next_row);
  constexpr int GROUP_LANES = B::PLANES == 4 ? 4 : 8 / B::PLANES;  // of the smallest group
  const int64_t size = p.matrix->group_size / (GROUP_LANES * B::PLANES * 4);  // in such groups
  auto few = digit_rows<B, GROUP_LANES, M>;
  if constexpr (!std::is_same_v<B, E2M1Block>) {  // mxfp4 has groups of 32 only
    if (size == 2) few = digit_rows<B, GROUP_LANES * 2, M>;
    if constexpr (B::PLANES < 4)
      if (size == 4) few = digit_rows<B, GROUP_LANES * 4, M>;
  }
  few(p, batch.outputs, rows, stride, batch.expert, first, count, ahead, next_row);
}

template <class B>
static bool multiply_blocks(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end, bool unpack) {
  const toast_matrix &m = *p.matrix;
  const bool few = batch.size <= max_few<B>();
  const int most = few ? 16 : TILE_ROWS * 16;
  char *buffer = nullptr;
  uint8_t *bytes = nullptr;
  if (!few && !(buffer = static_cast<char *>(toast::scratch(toast::ROWS, BUFFER_BYTES))))
    return false;
  if (unpack) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, most * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += most) {
    const int count = int(end - n < most ? end - n : most);
    const uint8_t *rows = row_at(m, batch.expert * m.rows + n);
    int64_t stride = row_bytes(m);
    if (unpack) {
      for (int j = 0; j < count; j++) unpack_bytes(m, rows + j * stride, bytes + j * m.columns);
      rows = bytes, stride = m.columns;
    }
    const int64_t next = n + most >= m.rows ? batch.next_row : batch.expert * m.rows + n + most;
    const uint8_t *ahead = unpack ? rows + most * stride : row_at(m, next);
    if (buffer) {
      auto many = count > 16 ? multiply_many<B, TILE_ROWS> : multiply_many<B, MIN_TILE_ROWS>;
      many(p, batch, n, count, rows, stride, ahead, next, buffer);
    } else if constexpr (MAX_FEW<B> > 0) {
      multiply_few<B, MAX_FEW<B>>(p, batch, n, count, rows, stride, ahead, next);
    }
  }
  return true;
}

#if defined(__AVX512VBMI__)
// Widths that VBMI unpacks in registers: 3, 5 and 6 bits, and 2 bits in groups of 32.
static bool is_narrow(const toast_matrix &m) {
  return m.bits == 3 || m.bits == 5 || m.bits == 6 || (m.bits == 2 && m.group_size <= 32);
}

static bool multiply_narrow(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  switch (p.matrix->bits) {
    case 2: return multiply_blocks<Block<2>>(p, batch, first, end, false);
    case 3: return multiply_blocks<Block<3>>(p, batch, first, end, false);
    case 5: return multiply_blocks<Block<5>>(p, batch, first, end, false);
    default: return multiply_blocks<Block<6>>(p, batch, first, end, false);
  }
}
#endif

static bool multiply_digits(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end) {
  const toast_matrix &m = *p.matrix;
#if defined(__AVX512VBMI__)
  if (is_narrow(m)) return multiply_narrow(p, batch, first, end);
#endif
  if (m.bits == 4 && m.type == TOAST_E8M0)
    return multiply_blocks<E2M1Block>(p, batch, first, end, false);
  if (m.bits == 4 && in_pairs(p)) return multiply_blocks<PairedBlock>(p, batch, first, end, false);
  if (m.bits == 4) return multiply_blocks<Block<4, 2>>(p, batch, first, end, false);
  if (m.bits == 2 && m.group_size > 32)
    return multiply_blocks<Block<2, 4>>(p, batch, first, end, false);
  return multiply_blocks<Block<8>>(p, batch, first, end, m.bits != 8);
}

static int64_t prepared_bytes(const toast::Product &p) {
  return toast::in_floats(p) ? float_bytes(p) : Layout::of(p).bytes;
}

static void prepare(const toast::Product &p, int64_t row) {
  return toast::in_floats(p) ? prepare_floats(p, row) : prepare_digits(p, row);
}

[[maybe_unused]] static bool multiply(const toast::Product &p, const toast::ExpertBatch &batch,
                                      int64_t first, int64_t end) {
  return toast::in_floats(p) ? multiply_floats(p, batch, first, end)
                             : multiply_digits(p, batch, first, end);
}

}  // namespace
