// Stands for the instructions of toastkit/native/kernels/amx.h where a processor has no AMX, in
// plain C++: strict as they are, so that what a processor would refuse ends the program.
#pragma once

#include <stdlib.h>
#include <string.h>

namespace {

struct Emulated {
  bool on;
  TileShapes shapes;
  union {
    uint8_t bytes[16][64];
    int32_t sums[16][16];
  } tiles[8];
};
static Emulated &tiles_of_thread() {
  static thread_local Emulated tiles{};
  return tiles;
}

static void must(bool right) {
  if (!right) abort();
}

static void shape_tiles(const TileShapes &shapes) {
  must(sizeof shapes == 64 && shapes.palette == 1 && !shapes.first_row);
  for (int i = 0; i < 16; i++)
    must(i < 8 ? shapes.rows[i] && shapes.rows[i] <= 16 && shapes.bytes[i] &&
                     shapes.bytes[i] <= 64 && shapes.bytes[i] % 4 == 0
               : !shapes.rows[i] && !shapes.bytes[i]);
  tiles_of_thread() = {true, shapes, {}};
}

static void release_tiles() { tiles_of_thread().on = false; }

template <int TILE>
static void clear_tile() {
  must(tiles_of_thread().on);
  memset(&tiles_of_thread().tiles[TILE], 0, 1024);
}

template <int TILE>
static void load_tile(const void *from, int64_t stride) {
  Emulated &all = tiles_of_thread();
  clear_tile<TILE>();
  for (int i = 0; i < all.shapes.rows[TILE]; i++)
    memcpy(all.tiles[TILE].bytes[i], static_cast<const char *>(from) + i * stride,
           all.shapes.bytes[TILE]);
}

template <int TILE>
static void store_tile(void *to, int64_t stride) {
  Emulated &all = tiles_of_thread();
  must(all.on);
  for (int i = 0; i < all.shapes.rows[TILE]; i++)
    memcpy(static_cast<char *>(to) + i * stride, all.tiles[TILE].bytes[i],
           all.shapes.bytes[TILE]);
}

template <Bytes KIND, int SUMS, int LEFT, int RIGHT>
static void multiply_tiles() {
  Emulated &all = tiles_of_thread();
  const TileShapes &s = all.shapes;
  must(all.on && SUMS != LEFT && SUMS != RIGHT && LEFT != RIGHT);
  must(s.rows[SUMS] == s.rows[LEFT] && s.bytes[SUMS] == s.bytes[RIGHT] &&
       s.bytes[LEFT] == s.rows[RIGHT] * 4);
  auto number = [](uint8_t byte, bool is_signed) { return is_signed ? int8_t(byte) : int(byte); };
  for (int i = 0; i < s.rows[SUMS]; i++)
    for (int k = 0; k < s.bytes[LEFT]; k++)
      for (int j = 0; j < s.bytes[SUMS] / 4; j++)
        all.tiles[SUMS].sums[i][j] +=
            number(all.tiles[LEFT].bytes[i][k], KIND != RIGHT_SIGNED) *
            number(all.tiles[RIGHT].bytes[k / 4][j * 4 + k % 4], KIND != LEFT_SIGNED);
}

static bool tiles_are_granted() { return true; }

}  // namespace
