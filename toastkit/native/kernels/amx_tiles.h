// Many vectors, where the processor multiplies tiles of bytes (AMX): the digits of 16 vectors meet
// the numbers of 16 rows, 64 columns of a group at a time, or the 32 that it has. A group takes as
// long as sums that leave the tiles take to be scaled, so that is done while others are multiplied.
#pragma once

namespace {

// Which tile holds what: numbers; digits, those of the second 64 columns two tiles on; of pairs the
// bytes as they are, which the lower digits meet; sums.
enum { NUMBERS = 0, UPPER = 2, LOWER = 3, BYTES = 5, UPPER_SUMS = 6, LOWER_SUMS = 7 };

// The tiles of this thread, for some vectors, while it lives.
struct Tiles {
  const char *const *vectors;
  int64_t members, stride;  // stride: bytes from one vector to the next,
  bool apart = false;       // where all have the same
  bool two, pairs;          // times 64 columns; of numbers
  int rows;                 // of a tile of digits
  alignas(64) int32_t sums[2][32][16];  // of 16 vectors, upper digits', then lower ones'; 16 rows
  alignas(64) char gathered[4][16][64];

  Tiles(const char *const *vectors, int64_t members, int group_size, bool pairs)
      : vectors(vectors), members(members), stride(members > 1 ? vectors[1] - vectors[0] : 64),
        two(group_size > 64), pairs(pairs), rows(int(std::min<int64_t>(members, 16))) {
    for (int64_t i = 2; i < members; i++) apart |= vectors[i] - vectors[i - 1] != stride;
    const int columns = std::min(group_size, 64);
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
      shapes.rows[i] = uint8_t(i < UPPER ? columns / 4 : rows);
      shapes.bytes[i] = uint16_t(i < UPPER || i >= UPPER_SUMS ? 64 : columns);
    }
    if (pairs) {
      shapes.rows[BYTES] = uint8_t(group_size / 8), shapes.bytes[BYTES] = 64;
      shapes.bytes[LOWER] = uint16_t(group_size / 2);
    }
    shape_tiles(shapes);
  }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles &) = delete;

  template <int TILE>
  void load_digits(int64_t first, int64_t place) {
    if (!apart) return load_tile<TILE>(vectors[first] + place, stride);
    auto digits = gathered[TILE - UPPER];
    for (int i = 0; i < rows; i++) store(digits[i], load<I32>(vectors[first + i] + place));
    load_tile<TILE>(digits, 64);
  }

  template <int N>
  void multiply(const Crosswise &c, int j, int32_t (*out)[16]) {
    clear_tile<UPPER_SUMS>();
    clear_tile<LOWER_SUMS>();
    load_tile<NUMBERS>(c.numbers + j * 64, N * 64);
    multiply_tiles<UPPER_SUMS, UPPER, NUMBERS>();
    if (!pairs) multiply_tiles<LOWER_SUMS, LOWER, NUMBERS>();
    if (two) {
      load_tile<NUMBERS + 1>(c.numbers + (16 * N + j) * 64, N * 64);
      multiply_tiles<UPPER_SUMS, UPPER + 2, NUMBERS + 1>();
      if (!pairs) multiply_tiles<LOWER_SUMS, LOWER + 2, NUMBERS + 1>();
    }
    if (pairs) {
      load_tile<BYTES>(c.numbers + (c.fours * N + j) * 64, N * 64);
      multiply_tiles<LOWER_SUMS, LOWER, BYTES>();
    }
    store_tile<UPPER_SUMS>(out, 64);
    store_tile<LOWER_SUMS>(out + 16, 64);
  }

  // What some groups give, added to y[i][j] of all members and 16 * N rows.
  template <int N, bool>
  void add(const Crosswise *groups, int64_t count, float *y, Coming &ahead) {
    for (; count; groups++, count--) add<N>(*groups, y, ahead);
  }

  template <int N>
  __attribute__((noinline)) void add(const Crosswise &c, float *y, Coming &ahead) {
    struct {
      const int32_t (*sums)[16];
      int64_t first, end;
      int j;
    } done = {};
    auto scale = [&]() __attribute__((always_inline)) {
      const F32 scales = load<F32>(c.scales + done.j * 16);
      const F32 biases = load<F32>(c.biases + done.j * 16);
      for (int64_t i = done.first; i < done.end; i++, done.sums++) {
        auto step = reinterpret_cast<const float *>(vectors[i] + c.step);
        auto total = reinterpret_cast<const float *>(vectors[i] + c.total);
        const I32 all = load<I32>(done.sums[0]) * 256 + load<I32>(done.sums[16]);
        float *out = y + (i * N + done.j) * 16;
        store(out, add_group(load<F32>(out), all, scales, biases, step, total));
      }
    };
    int turn = 0;
    for (int64_t i = 0; i < members; i += 16) {
      const int64_t at = std::min(i, members - rows);  // with some that have been added before
      load_digits<UPPER>(at, c.digits);
      load_digits<LOWER>(at, c.digits + c.lower);
      if (two) {
        load_digits<UPPER + 2>(at, c.digits + c.offsets[16]);
        if (!pairs) load_digits<LOWER + 2>(at, c.digits + c.offsets[16] + c.lower);
      }
      for (int j = 0; j < N; j++, turn ^= 1) {
        if (!i) ahead.fetch(c.fours * goes_of(members) / N);
        multiply<N>(c, j, sums[turn]);
        scale();
        done = {sums[turn] + (i - at), i, std::min(members, i + 16), j};
      }
    }
    scale();
  }
};

}  // namespace
