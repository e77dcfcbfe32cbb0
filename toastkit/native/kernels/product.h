// A product on its way: what an instruction set's code is handed.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "rows.h"

namespace toast {

// What a call of toast_multiply asks for. prepared: the vectors as `prepare` has left them.
struct Product {
  const toast_matrix *matrix;
  const toast_vectors *x;
  const uint32_t *vector;
  int32_t activation_bits;
  void *out;
  int32_t out_type;
  char *prepared;
  int64_t prepared_stride;  // bytes of one vector in it
};

// Whether a product is of floats, and not of whole numbers where a set has these.
inline bool in_floats(const Product &p) {
  return !p.matrix->bits || p.activation_bits >= TOAST_FLOATS;
}

constexpr int64_t BATCH = 64;  // of a group, but where Instructions say more:
constexpr int64_t MAX_BATCH = 128;

// Some results that one expert gives: places[i] < count, for i < members, MOST_MEMBERS at most.
// after: the row of the stack that comes after its last one, to be fetched ahead.
struct ExpertBatch {
  int64_t expert, size;
  const uint32_t *outputs;
  int64_t next_row;
};

// One instruction set's code, which one that is not there has not. prepared_bytes: of a vector, a
// multiple of 64. prepare: vector `row`. multiply: rows first up to `end` of an expert with all
// members of a group; false for no memory. rows: see rows.h.
struct Instructions {
  const char *name;
  bool (*is_available)();
  int64_t (*prepared_bytes)(const Product &) = nullptr;
  void (*prepare)(const Product &, int64_t row) = nullptr;
  bool (*multiply)(const Product &, const ExpertBatch &, int64_t first, int64_t end) = nullptr;
  const RowInstructions *rows = nullptr;
  const AttentionCode *attention = nullptr;
  int64_t max_batch = BATCH;  // of a group, at most, where packed numbers meet digits
};

// The set in use.
const Instructions &instructions();

// Those of x86-64, of 64-bit ARM, and of all others. Each has a source of its own. Who adds to
// Instructions adds to each of these: code in lanes.h's vectors (the compiler's) compiles for all.
extern const Instructions amx_int8, avx512vbmi, avx512vnni, avx2;
extern const Instructions neon_i8mm, neon_dotprod, neon;
extern const Instructions portable;

// What sets that differ in packed products have in common.
extern const RowInstructions avx512_rows, neon_rows;
extern const AttentionCode avx512_attention, neon_attention;

// Whether an ARM processor has them.
enum ArmFeature { DOTPROD, I8MM };
bool has(ArmFeature feature);

// Memory of the calling thread, aligned to 64 bytes, that lasts until it asks for more of that
// kind; NULL where there is none.
enum { ROWS, BYTES, SCORES, SUMS, PARTS, HEADS, QUERIES, KINDS };
void *scratch(int kind, int64_t bytes);

}  // namespace toast
