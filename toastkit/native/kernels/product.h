// What a product kernel is given, and the table of kernels of each instruction set.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "rows.h"

namespace toast {

// The arguments of toast_multiply. prepared: the vectors as `prepare` has stored them, in float32
// or quantised.
struct Product {
  const toast_matrix *matrix;
  const toast_vectors *x;
  const uint32_t *vector;
  int32_t activation_bits;
  void *out;
  int32_t out_type;
  char *prepared;
  int64_t prepared_stride;  // bytes per prepared vector
};

// Whether a product is computed in float32, rather than in whole numbers where it can be.
inline bool in_floats(const Product &p) {
  return !p.matrix->bits || p.activation_bits >= TOAST_FLOATS;
}

constexpr int64_t BATCH = 64;  // default of Instructions::max_batch, the most vectors per batch
constexpr int64_t MAX_BATCH = 128;

// Where the prepared vectors of a batch are larger, a part of their columns that is not meets
// several tiles of rows before the next part (digit_panels.h).
constexpr int64_t PANEL_BYTES = 512 << 10;

// Results of one expert, outputs[i] for i < size. next_row: the row of the stack that is read after
// the expert's last one, to prefetch. id: no other batch of other vectors ever has it.
struct ExpertBatch {
  int64_t expert, size;
  const uint32_t *outputs;
  int64_t next_row;
  uint64_t id;
};

// The kernels of one instruction set; NULL where the compiler lacks it. prepared_bytes: per vector,
// a multiple of a register's. prepare: converts vector `row`. multiply: rows [first, end) of an
// expert times all vectors of a batch; false if out of memory. rows: see rows.h.
struct Instructions {
  const char *name;
  bool (*is_available)();
  int64_t (*prepared_bytes)(const Product &) = nullptr;
  void (*prepare)(const Product &, int64_t row) = nullptr;
  bool (*multiply)(const Product &, const ExpertBatch &, int64_t first, int64_t end) = nullptr;
  const RowInstructions *rows = nullptr;
  const AttentionCode *attention = nullptr;
  int64_t max_batch = BATCH;  // of products in whole numbers
};

// The set in use.
const Instructions &instructions();

// One source file each. A new kernel goes into every set; code in lanes.h's portable vector types
// compiles for all of them.
extern const Instructions amx_int8, avx512vbmi, avx512vnni, avxvnni, avx2;
extern const Instructions neon_i8mm, neon_dotprod, neon;
extern const Instructions portable;

// Shared by the sets that differ in quantised products only.
extern const RowInstructions avx512_rows, avx2_rows, neon_rows;
extern const AttentionCode avx512_attention, avx2_attention, neon_attention;

// Whether an ARM processor has the feature.
enum ArmFeature { DOTPROD, I8MM };
bool has(ArmFeature feature);

// AMD's families 19h (of which Zen 4 has AVX-512) and 1Ah. Reads that hit L2 stall on Zen 5.
extern const bool is_zen4, is_zen5;

// Thread-local scratch of a kind, aligned to 64 bytes, valid until the next request for that kind;
// NULL if out of memory.
enum { ROWS, BYTES, SCORES, SUMS, PARTS, HEADS, QUERIES, VECTORS, KINDS };
void *scratch(int kind, int64_t bytes);

// Likewise, for what a thread makes of a batch's vectors. known: nobody else has asked since, so it
// is still there.
void *scratch_of(const ExpertBatch &batch, int64_t bytes, bool *known);

}  // namespace toast
