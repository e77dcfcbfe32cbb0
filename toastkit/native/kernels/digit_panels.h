// GEMM and small batches: which rows, columns and vectors meet when.
//
// Vectors that do not fit into L2 would come from memory again for every 64 rows. So a panel of
// their columns meets several tiles of rows, one after another, before the next panel; sums wait
// with their tile. Each is added up in the same order as without panels.
#pragma once

#include "digit_sixteens.h"

namespace {

constexpr int64_t SCALED_GROUPS = 16;  // whose scales are transposed at a time
constexpr int64_t MAX_MISSING = 2;     // of 16 vectors side by side; fewer are faster otherwise
// A matrix that pays for interleaving them.
constexpr int64_t SIXTEENS_ROWS = 65, SIXTEENS_COLUMNS = 512;

// Groups per panel: all where vectors fit, or where there are no rows that could share a panel.
INLINE int64_t panel_groups(const Layout &layout, int64_t batch, int64_t rows) {
  const int64_t panels = (layout.steps * batch + toast::PANEL_BYTES - 1) / toast::PANEL_BYTES;
  if (panels <= 1 || rows <= TILE_ROWS * 16) return layout.groups;
  const int64_t groups = (layout.groups + panels - 1) / panels;
  return (groups + SCALED_GROUPS - 1) / SCALED_GROUPS * SCALED_GROUPS;
}

// Rows [first, first + count) of an expert and groups [begin, end) of a panel: packed or a byte per
// code, `stride` apart. The same of the tile that follows, whose first row is the stack's next_row.
// y: (batch, N, 16 rows), of the groups before.
struct RowTile {
  int64_t first, begin, end;
  int count;
  const uint8_t *rows;
  int64_t stride, next_row, next_begin, next_end;
  float *y;
};

// Scales and biases, (16 groups, N, 16 rows) or (64 rows, SCALE_STRIDE), and a block of transposed
// weights.
struct TileBuffer {
  float *scales, *biases;
  char *weights;
  static constexpr int64_t SCALES = SCALED_GROUPS * TILE_ROWS * 16;
  static constexpr int64_t BYTES = 2 * SCALES * int64_t(sizeof(float)) +
                                   BLOCK_COLUMNS * TILE_ROWS * 16;
  static TileBuffer at(char *memory) {
    float *scales = reinterpret_cast<float *>(memory);
    return {scales, scales + SCALES, reinterpret_cast<char *>(scales + 2 * SCALES)};
  }
  // Of groups g to g + 15.
  template <int N>
  void take_scales(const toast_matrix &m, int64_t expert, const RowTile &tile, int64_t g) const {
    for (int j = 0; j < N; j++) {
      const int64_t row = expert * m.rows + tile.first + std::min(j * 16, tile.count - 1);
      F32 r[2][16];
      scales_by_group(m, row, std::clamp(tile.count - j * 16, 1, 16), g, r[0], r[1]);
      for (int64_t l = 0; l < 16; l++) {
        store(scales + (l * N + j) * 16, r[0][l]);
        store(biases + (l * N + j) * 16, r[1][l]);
      }
    }
  }
  // The same, row by row.
  void take_rows(const toast_matrix &m, int64_t expert, const RowTile &tile, int64_t g) const {
    const int64_t groups = m.columns / m.group_size;
    for (int j = 0; j < tile.count; j++) {
      const int64_t at = (expert * m.rows + tile.first + j) * groups + g;
      float *to = scales + j * SCALE_STRIDE;
      store(to, scales_of_row(m, m.scales, at, groups - g));
      store(to + 16, scales_of_row(m, m.biases, at, groups - g));
    }
  }
};

// What prefetches the rows and scales of the tile that follows: `steps` times per group of this
// one, and once.
struct NextTile {
  PartPrefetcher rows;
  ScalePrefetcher scales;
};

static NextTile prefetch_after(const toast_matrix &m, const RowTile &tile, int64_t rows,
                               int64_t steps) {
  const int64_t groups = tile.end - tile.begin, bytes = m.group_size * m.bits / 8;
  // Scales of all panels are fetched for the first one.
  const int64_t panels = m.columns / m.group_size / std::max<int64_t>(groups, 1);
  return {PartPrefetcher::over(row_at(m, tile.next_row) + tile.next_begin * bytes,
                               (tile.next_end - tile.next_begin) * bytes, row_bytes(m), rows,
                               groups * steps),
          ScalePrefetcher::of(m, tile.next_row, tile.next_begin ? 0 : rows * panels)};
}

// All vectors of a batch times a tile of up to 16 * N rows, added to its y.
template <class B, int N>
static void multiply_many(const toast::Product &p, const toast::ExpertBatch &batch,
                          const RowTile &tile, const TileBuffer &buffer) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(p);
  const auto offsets = Offsets::of(layout, STORED<B>, N);
  const char *vectors[toast::MAX_BATCH];
  const uint8_t *row_pointers[16 * N];  // missing ones repeat the last
  for (int i = 0; i < batch.size; i++) vectors[i] = digits_of(p, batch.outputs[i]);
  for (int i = 0; i < 16 * N; i++)
    row_pointers[i] = tile.rows + std::min(i, tile.count - 1) * tile.stride;
  Tiles tiles(vectors, batch.size, m.group_size, B::PAIRED);
  const int64_t words = layout.lanes * std::min(STORED<B>, B::PLANES), size = sizeof(float);
  const int64_t block_groups = block_columns<B>() / m.group_size;
  const int64_t bytes = m.group_size * B::BYTES / layout.weights;  // of a group of one row
  auto [next, next_scales] = prefetch_after(m, tile, 16 * N, words * passes_of(batch.size));
  for (int64_t g = tile.begin; g < tile.end; g += block_groups) {
    const int64_t end = std::min(tile.end, g + block_groups);
    const int64_t block = (g - tile.begin) * m.group_size / layout.weights;
    const int64_t blocks = ((end - g) * m.group_size + layout.weights - 1) / layout.weights;
    transpose_blocks<B, N>(row_pointers, block, blocks, (tile.end - g) * bytes, offsets,
                           buffer.weights);
    if (g % SCALED_GROUPS == 0) buffer.take_scales<N>(m, batch.expert, tile, g);
    TransposedGroup groups[MAX_BLOCK_COLUMNS / 32];
    for (int64_t at = g; at < end; at++) {
      next_scales.fetch();
      const int64_t scaled = at % SCALED_GROUPS * N * 16;
      groups[at - g] = {buffer.weights + (at - g) * layout.lanes * STORED<B> * N * 64,
                        buffer.scales + scaled, buffer.biases + scaled, offsets.digits, words,
                        layout.lower(at * m.group_size), layout.offset(at * m.group_size),
                        layout.steps + at * size, layout.sums + at * size};
    }
    tiles.add<N, B::PAIRED>(groups, end - g, tile.y, next);
  }
  for (int i = 0; i < batch.size && tile.end == layout.groups; i++)
    for (int j = 0; j * 16 < tile.count; j++)
      store_rows(p, batch.outputs[i], tile.first + j * 16, std::min(tile.count - j * 16, 16),
                 load<F32>(tile.y + (i * N + j) * 16));
}

// The same, 16 vectors at a time, whose digits are interleaved. y: (16 vectors each, 64 rows, 16).
static void multiply_sixteens(const toast::Product &p, const toast::ExpertBatch &batch,
                              const RowTile &tile, const TileBuffer &buffer) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(p);
  const auto sixteen = Sixteen::of(layout);
  const char *vectors = interleaved(p, batch, layout);
  const uint8_t *rows[TILE_ROWS * 16 + SHARING_ROWS];  // missing ones repeat the last
  for (int i = 0; i < TILE_ROWS * 16 + SHARING_ROWS; i++)
    rows[i] = tile.rows + std::min(i, tile.count - 1) * tile.stride;
  const int64_t parts = sixteens(batch.size);
  const int64_t fours = (tile.count + SHARING_ROWS - 1) / SHARING_ROWS;
  auto [next, next_scales] = prefetch_after(m, tile, TILE_ROWS * 16, parts * fours);
  const int64_t block_groups = MAX_BLOCK_COLUMNS / m.group_size, bytes = m.group_size / 2;
  for (int64_t g = tile.begin; g < tile.end; g += block_groups) {
    const int64_t end = std::min(tile.end, g + block_groups);
    for (int64_t at = g; at < end; at++) next_scales.fetch();
    if (g % SCALED_GROUPS == 0) buffer.take_rows(m, batch.expert, tile, g);
    for (int64_t i = 0; i < parts; i++) {
      const char *part = vectors + i * sixteen.bytes;
      for (int64_t j = 0; j < fours * SHARING_ROWS; j += SHARING_ROWS, next.go_on())
        multiply_sixteen(rows + j, (g - tile.begin) * bytes, layout.lanes, end - g,
                         part + g * sixteen.group_bytes, part + sixteen.steps + g * 128,
                         buffer.scales + j * SCALE_STRIDE + g % SCALED_GROUPS,
                         tile.y + (i * TILE_ROWS * 16 + j) * SIXTEEN, next);
    }
  }
  for (int64_t i = 0; i < batch.size && tile.end == layout.groups; i += SIXTEEN)
    for (int j = 0; j < tile.count; j += 16) {
      F32 r[SIXTEEN];
#pragma GCC unroll 16
      for (int k = 0; k < 16; k++)
        r[k] = load<F32>(tile.y + (i * TILE_ROWS * 16) + (j + k) * SIXTEEN);
      transpose(r);
      for (int k = 0; k < SIXTEEN && i + k < batch.size; k++)
        store_rows(p, batch.outputs[i + k], tile.first + j, std::min(tile.count - j, 16), r[k]);
    }
}

// Rows [first, end) of an expert times all vectors of a batch, panel by panel.
template <class B, bool SIXTEENS = false>
static bool multiply_panels(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end, bool unpack) {
  constexpr int64_t ROWS = TILE_ROWS * 16;
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout::of(p);
  const int64_t vectors = SIXTEENS ? sixteens(batch.size) * SIXTEEN : batch.size;
  const int64_t floats = vectors * ROWS, tiles = (end - first + ROWS - 1) / ROWS;
  const int64_t sums = tiles * floats * int64_t(sizeof(float));
  const int64_t panel = panel_groups(layout, batch.size, end - first);
  const int64_t columns = panel * m.group_size, above = batch.expert * m.rows;
  auto memory = static_cast<char *>(toast::scratch(toast::ROWS, TileBuffer::BYTES + sums));
  void *unpacked = unpack ? toast::scratch(toast::BYTES, ROWS * columns) : nullptr;
  if (!memory || (unpack && !unpacked)) return false;
  if (SIXTEENS && !interleaved(p, batch, layout)) return false;
  auto bytes = static_cast<uint8_t *>(unpacked);
  const TileBuffer buffer = TileBuffer::at(memory + sums);
  memset(memory, 0, sums);
  int64_t begin = 0;
  do {
    const int64_t until = std::min(layout.groups, begin + panel);
    const int64_t after = std::min(layout.groups, until + panel);
    for (int64_t n = first; n < end; n += ROWS) {
      const int count = int(std::min(end - n, ROWS));
      float *y = reinterpret_cast<float *>(memory) + (n - first) / ROWS * floats;
      const uint8_t *rows = row_at(m, above + n) + begin * m.group_size * m.bits / 8;
      RowTile tile = {
          .first = n, .begin = begin, .end = until, .count = count, .rows = rows,
          .stride = row_bytes(m), .next_row = above + n + ROWS, .next_begin = begin,
          .next_end = until, .y = y,
      };
      if (n + ROWS >= end && until < layout.groups) {
        tile.next_row = above + first, tile.next_begin = until, tile.next_end = after;
      } else if (n + ROWS >= end) {
        if (end >= m.rows) tile.next_row = batch.next_row;
        tile.next_begin = 0, tile.next_end = std::min(layout.groups, panel);
      }
      if (unpack) {
        toast_matrix part = m;
        part.columns = (until - begin) * m.group_size;
        for (int j = 0; j < count; j++)
          unpack_bytes(part, rows + j * tile.stride, bytes + j * columns);
        tile.rows = bytes, tile.stride = columns;
      }
      if (SIXTEENS) {
        multiply_sixteens(p, batch, tile, buffer);
        continue;
      }
      auto many = count > 16 ? multiply_many<B, TILE_ROWS> : multiply_many<B, MIN_TILE_ROWS>;
      many(p, batch, tile, buffer);
    }
    begin = until;
  } while (begin < layout.groups);
  return true;
}

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
static void few_rows(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                         int count, const uint8_t *rows, int64_t stride, const uint8_t *ahead,
                         int64_t next_row) {
  if constexpr (M > 1)
    if (batch.size < M)
      return few_rows<B, M - 1>(p, batch, first, count, rows, stride, ahead, next_row);
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

// Rows [first, end) of an expert times a batch of few vectors.
template <class B>
static bool multiply_few(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                         int64_t end, bool unpack) {
  constexpr int64_t ROWS = 16;
  const toast_matrix &m = *p.matrix;
  uint8_t *bytes = nullptr;
  if (unpack) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, ROWS * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += ROWS) {
    const int count = int(std::min(end - n, ROWS));
    const uint8_t *rows = row_at(m, batch.expert * m.rows + n);
    int64_t stride = row_bytes(m);
    if (unpack) {
      for (int j = 0; j < count; j++) unpack_bytes(m, rows + j * stride, bytes + j * m.columns);
      rows = bytes, stride = m.columns;
    }
    const int64_t next = n + ROWS >= m.rows ? batch.next_row : batch.expert * m.rows + n + ROWS;
    const uint8_t *ahead = unpack ? rows + ROWS * stride : row_at(m, next);
    few_rows<B, MAX_FEW<B>>(p, batch, n, count, rows, stride, ahead, next);
  }
  return true;
}

template <class B>
static bool multiply_blocks(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                            int64_t end, bool unpack) {
#if !defined(__AMX_INT8__)
  if constexpr (B::PAIRED) {  // on Zen 4 not measured yet
    const int64_t whole = (batch.size + MAX_MISSING) / SIXTEEN * SIXTEEN;
    const toast_matrix &m = *p.matrix;
    const bool large = m.rows >= SIXTEENS_ROWS && m.columns >= SIXTEENS_COLUMNS;
    if (whole && large && !toast::is_zen4) {
      auto part = batch;
      part.size = std::min(batch.size, whole);
      if (!multiply_panels<B, true>(p, part, first, end, unpack)) return false;
      part.outputs += part.size, part.size = batch.size - part.size;
      return !part.size || multiply_blocks<B>(p, part, first, end, unpack);
    }
  }
#endif
  if constexpr (MAX_FEW<B> > 0) {
    if (batch.size <= max_few<B>()) return multiply_few<B>(p, batch, first, end, unpack);
  }
  return multiply_panels<B>(p, batch, first, end, unpack);
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
