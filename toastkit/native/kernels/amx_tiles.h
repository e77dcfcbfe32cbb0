// GEMM on AMX: the digits of 16 vectors times 16 rows, 64 columns of a group at a time (32 in
// groups of 32).
//
// A tile of sums is ready 52 clocks after its product starts and cannot be reused before it is
// stored, so accumulators are double-buffered: while one pair is multiplied, the other is stored
// and the previous one scaled.
#pragma once

namespace {

// Tile registers: weight codes; for pairs the packed bytes, which lower digits meet; digits; sums,
// with the second buffer two tiles on.
enum { WEIGHT_TILE = 0, BYTE_TILE = 1, UPPER_TILE = 2, LOWER_TILE = 3, UPPER_SUMS = 4,
       LOWER_SUMS = 5 };

// 256 n by a byte shuffle: beside AMX, float code has one port only, which shifts would take.
INLINE I32 times_256(I32 n) {
  const __m128i up =
      _mm_setr_epi8(-128, 0, 1, 2, -128, 4, 5, 6, -128, 8, 9, 10, -128, 12, 13, 14);
  return (I32)_mm512_shuffle_epi8((__m512i)n, _mm512_broadcast_i32x4(up));
}

// Configures this thread's tiles for a batch while it lives.
class Tiles {
  // A group's upper digits; from these to lower ones; from either to the second 64 columns; and d.
  struct Digits {
    const char *upper;
    int64_t lower, second;
    const char *step;
    int64_t total;   // from `step` to d * sum of v
    int64_t stride;  // bytes per vector
  };
  // The same, gathered, where vectors are not evenly spaced.
  struct Gathered {
    alignas(64) char digits[4][64];  // upper (first and second 64 columns), then lower
    float step, total;
  };
  // Sums of 16 vectors and 64 rows that are still to be scaled.
  struct PendingScale {
    const float *scales, *biases;
    const char *step;
    int64_t total, stride, first;  // first: vectors before it have been added already
    float *y;
  };

  const char *const *vectors;
  int64_t batch, stride;
  bool uneven = false;                         // whether spacing varies
  bool two_blocks;                             // of 64 columns
  int rows;                                    // of a tile of digits
  alignas(64) int32_t sums[2][2][SIDE][SIDE];  // [buffer][upper, lower]
  Gathered gathered[2][SIDE];

  Digits digits_of(const TransposedGroup &c, int64_t first, int slot) {
    const char *at = vectors[first];
    const int64_t second = two_blocks ? c.offsets[16] : 0;
    if (!uneven) return {at + c.digits, c.lower, second, at + c.step, c.total - c.step, stride};
    for (int i = 0; i < rows; i++) {
      at = vectors[first + i];
      Gathered &to = gathered[slot][i];
      for (int k = 0; k < (two_blocks ? 2 : 1); k++)
        for (int part = 0; part < 2; part++)
          store(to.digits[part * 2 + k], load<I32>(at + c.digits + k * second + part * c.lower));
      memcpy(&to.step, at + c.step, sizeof(float));
      memcpy(&to.total, at + c.total, sizeof(float));
    }
    const Gathered &g = gathered[slot][0];
    return {g.digits[0], 128, 64, reinterpret_cast<const char *>(&g.step), sizeof(float), sizeof g};
  }

  // A group's digits times the j-th 16 rows, into accumulators SLOT; these, of two steps ago, are
  // stored first if `stored`.
  template <int N, bool PAIRED, int SLOT>
  INLINE void multiply(const TransposedGroup &c, const Digits &d, int j, bool two_blocks,
                       bool stored, int32_t (*sums)[2][SIDE][SIDE]) {
    constexpr int UPPERS = UPPER_SUMS + SLOT * 2, LOWERS = LOWER_SUMS + SLOT * 2;
    const char *weights = c.weights + j * 64;
    load_tile<WEIGHT_TILE>(weights, N * 64);
    if (!j || two_blocks) load_tile<UPPER_TILE>(d.upper, d.stride);
    if (PAIRED) load_tile<BYTE_TILE>(weights + c.words * N * 64, N * 64);
    if (!j || (two_blocks && !PAIRED)) load_tile<LOWER_TILE>(d.upper + d.lower, d.stride);
    if (stored) store_tile<UPPERS>(sums[SLOT][0], 64);
    clear_tile<UPPERS>();
    multiply_tiles<LEFT_SIGNED, UPPERS, UPPER_TILE, WEIGHT_TILE>();
    if (stored) store_tile<LOWERS>(sums[SLOT][1], 64);
    clear_tile<LOWERS>();
    multiply_tiles<LEFT_SIGNED, LOWERS, LOWER_TILE, PAIRED ? BYTE_TILE : WEIGHT_TILE>();
    if (!two_blocks) return;
    load_tile<WEIGHT_TILE>(weights + 16 * N * 64, N * 64);
    load_tile<UPPER_TILE>(d.upper + d.second, d.stride);
    multiply_tiles<LEFT_SIGNED, UPPERS, UPPER_TILE, WEIGHT_TILE>();
    if (PAIRED) return;
    load_tile<LOWER_TILE>(d.upper + d.second + d.lower, d.stride);
    multiply_tiles<LEFT_SIGNED, LOWERS, LOWER_TILE, WEIGHT_TILE>();
  }

  // Scales a step's stored sums and adds them to y of its j-th 16 rows.
  template <int N>
  INLINE void scale(const int32_t (*sums)[SIDE][SIDE], const PendingScale &s, int j, int rows) {
    const F32 scales = load<F32>(s.scales + j * SIDE), biases = load<F32>(s.biases + j * SIDE);
    const char *step = s.step + s.first * s.stride;
    const int64_t total = s.total, stride = s.stride;
    float *y = s.y + j * SIDE;
    auto add = [&](int64_t i) __attribute__((always_inline)) {
      const I32 all = times_256(load<I32>(sums[0][i])) + load<I32>(sums[1][i]);
      float *out = y + i * N * SIDE;
      store(out, add_group(load<F32>(out), all, scales, biases,
                           reinterpret_cast<const float *>(step),
                           reinterpret_cast<const float *>(step + total)));
      step += stride;
    };
    if (rows == SIDE && !s.first) {
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; i++) add(i);
    } else {
      for (int64_t i = s.first; i < rows; i++) add(i);
    }
  }

 public:
  Tiles(const char *const *vectors, int64_t batch, int group_size, bool pairs)
      : vectors(vectors), batch(batch), stride(batch > 1 ? vectors[1] - vectors[0] : 64),
        two_blocks(group_size > 64), rows(int(std::min<int64_t>(batch, SIDE))) {
    for (int64_t i = 2; i < batch; i++) uneven |= vectors[i] - vectors[i - 1] != stride;
    const int columns = std::min(group_size, 64);
    TileShapes shapes;
    for (int i = 0; i < 8; i++)
      shapes.set(i, i < UPPER_TILE ? columns / 4 : rows,
                 i < UPPER_TILE || i >= UPPER_SUMS ? 64 : columns);
    if (pairs) {
      shapes.set(BYTE_TILE, group_size / 8, 64);
      shapes.set(LOWER_TILE, rows, group_size / 2);
    }
    shape_tiles(shapes);
  }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles &) = delete;

  // Adds `count` groups to y[i][j] of all vectors and 16 * N rows. Members are copied to locals:
  // loads may have to wait for tile stores.
  template <int N, bool PAIRED>
  __attribute__((noinline)) void add(const TransposedGroup *groups, int64_t count, float *y,
                                     PartPrefetcher &ahead) {
    static_assert(N == 4);
    const int rows = this->rows;
    const bool two_blocks = this->two_blocks;
    int32_t(*const sums)[2][SIDE][SIDE] = this->sums;
    PendingScale s = {};
    const int64_t steps = (batch + SIDE - 1) / SIDE * N, passes = passes_of(batch);
    bool pending = false;
    int slot = 0;
    for (int64_t i = 0; i < batch; i += SIDE) {
      const int64_t at = std::min(i, batch - rows);  // the last tile overlaps the one before
      for (const TransposedGroup *c = groups; c < groups + count; c++, slot ^= 1) {
        const Digits d = digits_of(*c, at, slot);
        const int64_t lines = c->words * passes / steps;
        ahead.go_on();
        ahead.fetch(lines);
        multiply<N, PAIRED, 0>(*c, d, 0, two_blocks, pending, sums);
        if (pending) scale<N>(sums[1], s, 1, rows);
        ahead.fetch(lines);
        multiply<N, PAIRED, 1>(*c, d, 1, two_blocks, pending, sums);
        if (pending) scale<N>(sums[0], s, 2, rows);
        ahead.fetch(lines);
        multiply<N, PAIRED, 0>(*c, d, 2, two_blocks, true, sums);
        if (pending) scale<N>(sums[1], s, 3, rows);
        ahead.fetch(lines);
        multiply<N, PAIRED, 1>(*c, d, 3, two_blocks, true, sums);
        s = {c->scales, c->biases, d.step, d.total, d.stride, i - at, y + at * N * SIDE};
        scale<N>(sums[0], s, 0, rows);
        pending = true;
      }
    }
    store_tile<UPPER_SUMS>(sums[0][0], 64);
    store_tile<LOWER_SUMS>(sums[0][1], 64);
    scale<N>(sums[1], s, 1, rows);
    store_tile<UPPER_SUMS + 2>(sums[1][0], 64);
    store_tile<LOWER_SUMS + 2>(sums[1][1], 64);
    scale<N>(sums[0], s, 2, rows);
    scale<N>(sums[1], s, 3, rows);
  }
};

}  // namespace
