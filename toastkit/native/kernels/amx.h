// AMX int8 tiles, eight per thread: the instructions, and whether they may be used.
#pragma once

#include <stdint.h>

namespace {

// The operand of LDTILECFG: rows, and bytes per row, of each tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t rows_of, int64_t bytes_of) {
    rows[tile] = uint8_t(rows_of), bytes[tile] = uint16_t(bytes_of);
  }
};

constexpr int SIDE = 16;  // most rows of a tile, and most int32 per row

enum Bytes { BOTH_SIGNED, LEFT_SIGNED, RIGHT_SIGNED };  // signedness of the operands

}  // namespace

#if defined(TOAST_AMX_EMULATED)  // tests include a header that emulates the instructions
#include TOAST_AMX_EMULATED
#else

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// In asm, as the compilers' intrinsics do not tell what memory they read.
static inline void shape_tiles(const TileShapes &shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Leaves no tile state for a context switch to save.
static inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
static inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// stride: bytes per row.
template <int TILE>
static inline void load_tile(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
static inline void store_tile(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// SUMS int32 (rows, 16) += LEFT bytes (rows, 4 k) times RIGHT bytes (k, 16, 4).
template <Bytes KIND, int SUMS, int LEFT, int RIGHT>
static inline void multiply_tiles() {
  if (KIND == BOTH_SIGNED)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
  if (KIND == LEFT_SIGNED)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
  if (KIND == RIGHT_SIGNED)
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// Whether the processor has AMX, the system saves its state, and permits it when asked, once per
// process: a thread's signal frame then takes 8 KB more.
static bool tiles_are_granted() {
  constexpr unsigned TILES = 1u << 24, INT8 = 1u << 25;  // of CPUID leaf 7
  constexpr unsigned SAVED = 3u << 17;                   // of XCR0: configuration and data
  constexpr int ASK = 0x1023, DATA = 18;                 // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d, state, upper;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (TILES | INT8)) return false;
  asm volatile("xgetbv" : "=a"(state), "=d"(upper) : "c"(0));
  return !(~state & SAVED) && syscall(SYS_arch_prctl, ASK, DATA) == 0;
}

}  // namespace

#endif
