// Products with many vectors on words (words16.h): the codes of sixteen rows are widened and
// transposed, some groups of columns at a time, and meet all vectors of a batch. A lane is a row,
// so its sums need no adding up; two neighbours of a prepared vector are one broadcast.
#pragma once

namespace {

constexpr int PANEL_ROWS = 2 * LANES;
constexpr int64_t PANEL_COLUMNS = 512;  // at most, unless a group is longer: 16 KB as words
constexpr int PANEL_VECTORS = 6;        // that meet a panel together

// Some groups of N * LANES rows. words: (groups, pairs of columns, N, LANES), a pair in 32 bits.
// scales, biases: (LANES groups, N).
template <int N>
struct WordPanel {
  const I32 *words;
  F32 scales[LANES][N], biases[LANES][N];
  int64_t groups, pairs;  // pairs: of a group
};

// Adds M vectors times a panel to y: (vectors, N * LANES). places: byte offsets in a prepared
// vector, of the first group's numbers, and of its step and total. Prefetches once a group.
template <int M, int N>
static __attribute__((noinline)) void add_panel(const WordPanel<N> &panel,
                                                const char *const *vectors, const int64_t *places,
                                                float *y, PacedPrefetch &ahead) {
  F32 results[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M * N; i++) results[i / N][i % N] = load<F32>(y + i * LANES);
  const char *numbers[M];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) numbers[i] = vectors[i] + places[0];
  const I32 *words = panel.words;
  int64_t at = 0;
  for (int64_t g = 0; g < panel.groups; g++) {
    I32 sums[M][N] = {};
    ahead.fetch(1);
    for (const int64_t end = at + 4 * panel.pairs; at < end; at += 4, words += N) {
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        const I32 pair = I32{} + load<int32_t>(numbers[i] + at);
#pragma GCC unroll 2
        for (int j = 0; j < N; j++) add_product(sums[i][j], words[j], pair);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const float step = load<float>(vectors[i] + places[1] + 4 * g);
      const F32 total = splat(load<float>(vectors[i] + places[2] + 4 * g));
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) {
        const F32 sum = __builtin_convertvector(sums[i][j], F32);
        results[i][j] = multiply_add(sum, panel.scales[g][j] * step, results[i][j]);
        results[i][j] = multiply_add(panel.biases[g][j], total, results[i][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M * N; i++) store(y + i * LANES, results[i / N][i % N]);
}

// Four codes of a row, a byte each, as two pairs of words.
struct Bytes {
  static constexpr bool E2M1 = false;
  static constexpr int CODES = 16, PARTS = 2;
  INLINE I32 widened(I32 q, int pair) {
    const __m256i fours = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                            0x08080808, 0x0c0c0c0c);
    const __m256i two = _mm256_set1_epi32(int(pair ? 0x80038002u : 0x80018000u));
    return (I32)_mm256_shuffle_epi8((__m256i)q, _mm256_or_si256(two, fours));
  }
};

// 16 bytes of each of LANES rows, which lie two to a register, so that lanes are rows.
INLINE void transpose_codes(const I32 *q, I32 *out) {
  auto low = [](I32 a, I32 b) { return _mm256_unpacklo_epi32((__m256i)a, (__m256i)b); };
  auto high = [](I32 a, I32 b) { return _mm256_unpackhi_epi32((__m256i)a, (__m256i)b); };
  const __m256i a = low(q[0], q[1]), b = low(q[2], q[3]), c = high(q[0], q[1]),
                d = high(q[2], q[3]);
  out[0] = (I32)_mm256_unpacklo_epi64(a, b), out[1] = (I32)_mm256_unpackhi_epi64(a, b);
  out[2] = (I32)_mm256_unpacklo_epi64(c, d), out[3] = (I32)_mm256_unpackhi_epi64(c, d);
}

// Units [first, end) of N * LANES rows, as in WordPanel. Pairs of nibbles come part by part, pairs
// of bytes one after another, as the numbers of a prepared vector.
template <class P, int N>
static void widen_codes(const uint8_t *const *rows, int64_t first, int64_t end, I32 *words) {
  constexpr bool BYTES = std::is_same_v<P, Bytes>;
  for (int64_t u = first; u < end; u++, words += P::PARTS * 4 * N) {
    for (int n = 0; n < N; n++) {
      I32 q[4], codes[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const uint8_t *const *row = rows + n * LANES + j;
        q[j] = load_codes_of(row[0] + u * UNIT, row[4] + u * UNIT);
      }
      transpose_codes(q, codes);
#pragma GCC unroll 16
      for (int k = 0; k < P::PARTS * 4; k++)
        words[k * N + n] = P::widened(codes[BYTES ? k / 2 : k % 4], BYTES ? k % 2 : k / 4);
    }
  }
}

// All vectors of a batch times `count` <= N * LANES rows from `first` on.
template <class P, int N>
static bool multiply_panels(const toast::Product &p, const toast::ExpertBatch &batch,
                            const uint8_t *const *rows, int64_t first, int count) {
  const toast_matrix &m = *p.matrix;
  const auto layout = Layout<true>::of(m);
  const int64_t units = m.group_size / P::CODES;
  const int64_t most = std::clamp<int64_t>(PANEL_COLUMNS / m.group_size, 1, LANES);
  auto y = static_cast<float *>(toast::scratch(toast::SUMS, batch.size * N * LANES * 4));
  auto words = static_cast<I32 *>(toast::scratch(toast::ROWS, most * m.group_size * N * LANES * 2));
  if (!y || !words) return false;
  memset(y, 0, batch.size * N * LANES * sizeof(float));
  int64_t numbers[N * LANES];
  for (int j = 0; j < N * LANES; j++)
    numbers[j] = batch.expert * m.rows + first + (j < count ? j : count - 1);
  auto vector = [&](int64_t i) {
    return p.prepared + (p.vector ? p.vector[batch.outputs[i]] : batch.outputs[i]) *
                            p.prepared_stride;
  };
  const int64_t all = (batch.size + PANEL_VECTORS - 1) / PANEL_VECTORS;
  auto next = reinterpret_cast<const char *>(row_at(m, numbers[0] + N * LANES));
  const int64_t steps = std::max<int64_t>(layout.groups * all, 1);
  auto ahead = PacedPrefetch::over(next, N * LANES * row_bytes(m), steps);
  for (int64_t g = 0; g < layout.groups; g += most) {
    WordPanel<N> panel;
    panel.words = words, panel.pairs = m.group_size / 2;
    panel.groups = std::min(most, layout.groups - g);
    for (int n = 0; n < N; n++) {
      F32 scales[LANES], biases[LANES];
      both_by_group<P::E2M1>(m, numbers + n * LANES, layout.groups, g, scales, biases);
      for (int i = 0; i < LANES; i++)
        panel.scales[i][n] = scales[i], panel.biases[i][n] = biases[i];
    }
    widen_codes<P, N>(rows, g * units, (g + panel.groups) * units, words);
    const int64_t places[3] = {g * m.group_size * 2, layout.steps + 4 * g, layout.sums + 4 * g};
    int64_t passes = all, done = 0;
    for (; passes; passes--) {
      const int64_t size = (batch.size - done + passes - 1) / passes;
      const char *vectors[PANEL_VECTORS];
      for (int64_t i = 0; i < size; i++) vectors[i] = vector(done + i);
      float *out = y + done * N * LANES;
      switch (size) {
        case 1: add_panel<1, N>(panel, vectors, places, out, ahead); break;
        case 2: add_panel<2, N>(panel, vectors, places, out, ahead); break;
        case 3: add_panel<3, N>(panel, vectors, places, out, ahead); break;
        case 4: add_panel<4, N>(panel, vectors, places, out, ahead); break;
        case 5: add_panel<5, N>(panel, vectors, places, out, ahead); break;
        default: add_panel<6, N>(panel, vectors, places, out, ahead);
      }
      done += size;
    }
  }
  for (int64_t i = 0; i < batch.size; i++)
    for (int n = 0; n < N && n * LANES < count; n++)
      put_some(p.out_type, p.out, batch.outputs[i] * m.rows + first + n * LANES,
               load<F32>(y + (i * N + n) * LANES), std::min(count - n * LANES, LANES));
  return true;
}

// All vectors of a batch times rows [first, end) of an expert. False if out of memory.
template <class P>
static bool multiply_many(const toast::Product &p, const toast::ExpertBatch &batch, int64_t first,
                          int64_t end) {
  constexpr bool NIBBLES = P::BYTES * 2 == P::CODES;
  using Form = std::conditional_t<NIBBLES, P, Bytes>;  // after unpacking
  const toast_matrix &m = *p.matrix;
  const bool as_is = NIBBLES || m.bits == 8;
  uint8_t *bytes = nullptr;
  if (!as_is) {
    bytes = static_cast<uint8_t *>(toast::scratch(toast::BYTES, PANEL_ROWS * m.columns));
    if (!bytes) return false;
  }
  for (int64_t n = first; n < end; n += PANEL_ROWS) {
    const int count = int(std::min<int64_t>(end - n, PANEL_ROWS));
    const uint8_t *rows[PANEL_ROWS];
    find_rows(m, batch.expert * m.rows + n, count, bytes, rows);
    for (int j = count; j < PANEL_ROWS; j++) rows[j] = rows[count - 1];  // as missing ones
    if (!(count > LANES ? multiply_panels<Form, 2>(p, batch, rows, n, count)
                        : multiply_panels<Form, 1>(p, batch, rows, n, count)))
      return false;
  }
  return true;
}

}  // namespace
