// Many vectors: rows are brought crosswise once, 16 to a register, and meet all vectors.
#pragma once

#include <algorithm>
#include <type_traits>

#include "digit_rows.h"
#include "floats.h"

namespace {

constexpr int TILE_ROWS = 4;       // of 16 rows each
constexpr int64_t AT_ONCE = 4096;  // columns that are brought crosswise at a time

// A group of numbers of 16 * N rows, and the vectors that meet it.
struct Crosswise {
  const char *numbers;           // (planes, lanes, N, 16 rows, 4)
  const float *scales, *biases;  // (N, 16 rows)
  const int32_t *offsets;        // (planes, lanes): from `digits` to the upper ones of four numbers
  int64_t fours, lower;          // planes * lanes; from upper digits to lower ones
  int64_t digits, step, total;   // from a vector's beginning
};

// What a group gives, added to y[i][j] of M members and 16 * N rows.
template <int M, int N>
static __attribute__((noinline)) void digit_tile(const Crosswise &c, const char *const *vectors,
                                                 float *y, int64_t y_stride) {
  I32 upper[M][N], lower[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) upper[i][j] = lower[i][j] = I32{};
  const char *digits[M], *numbers = c.numbers;
  for (int i = 0; i < M; i++) digits[i] = vectors[i] + c.digits;
  const int64_t to_lower = c.lower;
  for (const int32_t *at = c.offsets, *end = at + c.fours; at < end; at++, numbers += 64 * N) {
    I32 rows[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) rows[j] = load<I32>(numbers + j * 64);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      int32_t four[2];
      memcpy(four, digits[i] + *at, 4);
      memcpy(four + 1, digits[i] + *at + to_lower, 4);
      const I32 up = I32{} + four[0], low = I32{} + four[1];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) add_fours(upper[i][j], rows[j], up);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) add_fours(lower[i][j], rows[j], low);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) {
    auto step = reinterpret_cast<const float *>(vectors[i] + c.step);
    auto total = reinterpret_cast<const float *>(vectors[i] + c.total);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      float *out = y + i * y_stride + j * 16;
      store(out, add_group(load<F32>(out), upper[i][j] * 256 + lower[i][j],
                           load<F32>(c.scales + j * 16), load<F32>(c.biases + j * 16), step,
                           total));
    }
  }
}

template <int N>
INLINE void digit_tiles(const Crosswise &c, const char *const *vectors, int members, float *y,
                        int64_t y_stride) {
  int i = 0;
  for (; i + 3 <= members; i += 3) digit_tile<3, N>(c, vectors + i, y + i * y_stride, y_stride);
  if (i + 2 == members) digit_tile<2, N>(c, vectors + i, y + i * y_stride, y_stride);
  if (i + 1 == members) digit_tile<1, N>(c, vectors + i, y + i * y_stride, y_stride);
}

// Brings columns crosswise, of 16 rows that are the j-th of N such: blocks from `block` on.
template <class B>
static void bring_crosswise(const toast_matrix &m, const uint8_t *rows, int64_t stride, int count,
                            int64_t block, int64_t blocks, int lanes, int j, int n,
                            char *out) {
  const int64_t most = m.columns * B::BYTES / (BLOCK * B::PLANES);
  for (int64_t b = block; b < block + blocks; b++) {
    I32 planes[2][16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      I32 q[2];
      const uint8_t *at = rows + (i < count ? i : count - 1) * stride + b * B::BYTES;
      B::spread(B::load(at, most - b * B::BYTES), q);
      planes[0][i] = q[0];
      if (B::PLANES == 2) planes[1][i] = q[1];
    }
    for (int k = 0; k < B::PLANES; k++) {
      transpose(planes[k]);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        const int64_t lane = (b - block) * 16 + i, g = lane / lanes;
        const int64_t at = (g * B::PLANES + k) * lanes + lane % lanes;
        store(out + (at * n + j) * 64, planes[k][i]);
      }
    }
  }
}

// Columns that are brought crosswise next, of some rows: where, and how many bytes of each.
struct Next {
  const uint8_t *rows;
  int64_t stride, count, bytes;
};

// The i-th of `all` parts of them.
INLINE void fetch(const Next &next, int64_t i, int64_t all) {
  const int64_t from = (next.bytes * i / all + 63) & ~63, end = next.bytes * (i + 1) / all;
  for (int64_t j = 0; from < end && j < next.count; j++)
    for (int64_t at = from; at < end; at += 64)
      _mm_prefetch(reinterpret_cast<const char *>(next.rows + j * next.stride + at),
                   _MM_HINT_T1);
}

// The results of up to 64 members and 16 * n rows.
template <class B>
static void many_digits(const toast::Product &p, const toast::Group &group, int64_t first,
                        int count, const uint8_t *rows, int64_t stride, char *room) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(m);
  const int n = count > 16 ? TILE_ROWS : 1, bits = B::BYTES * 8 / (BLOCK * B::PLANES);
  const char *vectors[toast::MOST_MEMBERS];
  for (int i = 0; i < group.members; i++) vectors[i] = digits_of(p, group.places[i]);
  int32_t offsets[32];
  for (int i = 0; i < layout.lanes * layout.planes; i++) {
    const int lane = i % layout.lanes, plane = i / layout.lanes;
    offsets[i] = int32_t(lane / 16 * layout.numbers * 2 + lane % 16 * 4 + plane * BLOCK);
  }
  float *y = reinterpret_cast<float *>(room);
  memset(y, 0, group.members * n * 64);
  char *numbers = room + toast::MOST_MEMBERS * TILE_ROWS * 64;
  auto scales = reinterpret_cast<float *>(numbers + AT_ONCE * TILE_ROWS * 16);
  float *biases = scales + AT_ONCE / 32 * TILE_ROWS * 16;
  for (int64_t k = 0; k < m.columns; k += AT_ONCE) {
    const int64_t g = k / m.group_size, after = k + AT_ONCE < m.columns ? k + AT_ONCE : m.columns;
    const int64_t groups = after / m.group_size - g, block = k / layout.numbers;
    const int64_t blocks = (after + layout.numbers - 1) / layout.numbers - block;
    for (int j = 0; j < n; j++) {
      const int here = count - j * 16 > 16 ? 16 : count - j * 16 > 0 ? count - j * 16 : 1;
      const int64_t skip = count - j * 16 > 0 ? j * 16 : 0;  // rows that are not there: any
      bring_crosswise<B>(m, rows + skip * stride, stride, here, block, blocks,
                            layout.lanes, j, n, numbers);
      for (int64_t i = 0; i < groups; i += 16) {
        F32 r[2][16];
        const int64_t row = group.expert * m.rows + first + skip;
        fetch_numbers(m, row + 16 * n, g + i);
        numbers_by_group(m, row, here, g + i, r[0], r[1]);
        for (int64_t l = 0; l < 16 && i + l < groups; l++) {
          store(scales + ((i + l) * n + j) * 16, r[0][l]);
          store(biases + ((i + l) * n + j) * 16, r[1][l]);
        }
      }
    }
    const int64_t fours = layout.lanes * layout.planes, left = m.columns - after;
    const Next next = {left ? rows + after * bits / 8 : rows + 16 * n * stride, stride, 16 * n,
                       std::min(left ? left : m.columns, AT_ONCE) * bits / 8};
    for (int64_t i = 0; i < groups; i++) {
      fetch(next, i, groups);
      const int64_t lane = (g + i) * layout.lanes, at = g + i;
      const Crosswise c = {
          numbers + i * fours * n * 64, scales + i * n * 16, biases + i * n * 16, offsets, fours,
          layout.numbers, lane / 16 * layout.numbers * 2 + lane % 16 * 4,
          layout.steps + at * int64_t(sizeof(float)), layout.sums + at * int64_t(sizeof(float))};
      if (n == 1) {
        digit_tiles<1>(c, vectors, int(group.members), y, 16);
      } else {
        digit_tiles<TILE_ROWS>(c, vectors, int(group.members), y, TILE_ROWS * 16);
      }
    }
  }
  for (int i = 0; i < group.members; i++)
    for (int j = 0; j * 16 < count; j++)
      put_sixteen(p, group.places[i], first + j * 16, count - j * 16 > 16 ? 16 : count - j * 16,
                  load<F32>(y + (i * n + j) * 16));
}

constexpr int64_t ROOM = toast::MOST_MEMBERS * TILE_ROWS * 64 + AT_ONCE * TILE_ROWS * 16 +
                         2 * AT_ONCE / 32 * TILE_ROWS * 64;

template <class B>
static void few_digits(const toast::Product &p, uint32_t place, const uint8_t *rows,
                       int64_t stride, int64_t expert, int64_t first, int count,
                       const uint8_t *ahead, int64_t row_ahead) {
  constexpr int LANES_ = 8 / B::PLANES;  // of the smallest group
  if constexpr (!std::is_same_v<B, Doubled>) {  // which has no other groups
    if (p.matrix->group_size == 64)
      return digit_rows<B, LANES_ * 2>(p, place, rows, stride, expert, first, count, ahead,
                                       row_ahead);
    if (p.matrix->group_size == 128)
      return digit_rows<B, LANES_ * 4>(p, place, rows, stride, expert, first, count, ahead,
                                       row_ahead);
  }
  digit_rows<B, LANES_>(p, place, rows, stride, expert, first, count, ahead, row_ahead);
}

// Members that meet rows as they lie: of 4 bits, which are spread out fastest, eight.
template <class B>
constexpr int FEW = B::PLANES == 2 ? 8 : 3;

template <class B>
static bool multiply_blocks(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end, bool spread) {
  const toast_matrix &m = *p.matrix;
  const int most = group.members > FEW<B> ? TILE_ROWS * 16 : 16;
  char *room = nullptr;
  uint8_t *bytes = nullptr;
  if (group.members > FEW<B>)
    if (!(room = static_cast<char *>(toast::scratch(toast::ROWS, ROOM)))) return false;
  if (spread) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, most * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += most) {
    const int count = int(end - n < most ? end - n : most);
    const uint8_t *rows = row_at(m, group.expert * m.rows + n);
    int64_t stride = row_bytes(m);
    if (spread) {
      for (int j = 0; j < count; j++) unpack_bytes(m, rows + j * stride, bytes + j * m.columns);
      rows = bytes, stride = m.columns;
    }
    if (room) {
      many_digits<B>(p, group, n, count, rows, stride, room);
    } else {
      const bool last = n + most >= m.rows;
      const int64_t next = last ? group.after : group.expert * m.rows + n + most;
      const uint8_t *ahead = spread ? rows + most * stride : row_at(m, next);
      for (int64_t i = 0; i < group.members; i++)
        few_digits<B>(p, group.places[i], rows, stride, group.expert, n, count, ahead, next);
    }
  }
  return true;
}

static bool multiply_digits(const toast::Product &p, const toast::Group &group, int64_t first,
                            int64_t end) {
  switch (p.matrix->bits) {
    case 4:
      if (p.matrix->type == TOAST_E8M0)
        return multiply_blocks<Doubled>(p, group, first, end, false);
      return multiply_blocks<Block<4>>(p, group, first, end, false);
    case 8: return multiply_blocks<Block<8>>(p, group, first, end, false);
#if defined(__AVX512VBMI__)
    case 2: return multiply_blocks<Block<2>>(p, group, first, end, false);
    case 3: return multiply_blocks<Block<3>>(p, group, first, end, false);
    case 6: return multiply_blocks<Block<6>>(p, group, first, end, false);
#endif
    default: return multiply_blocks<Block<8>>(p, group, first, end, true);
  }
}

// Whether a product is computed with digits, or else as floats.h does.
static bool in_digits(const toast::Product &p) { return p.matrix->bits && !p.exact; }

static int64_t prepared_bytes(const toast::Product &p) {
  return in_digits(p) ? Layout::of(*p.matrix).bytes : floats_bytes(p);
}

static void prepare(const toast::Product &p, int64_t row) {
  return in_digits(p) ? prepare_digits(p, row) : prepare_floats(p, row);
}

static bool multiply(const toast::Product &p, const toast::Group &group, int64_t first,
                     int64_t end) {
  return in_digits(p) ? multiply_digits(p, group, first, end)
                      : multiply_floats(p, group, first, end);
}

}  // namespace
