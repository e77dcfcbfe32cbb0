// The C interface of the CPU kernels: quantised and float GEMV/GEMM, and attention. Plain pointers
// in and out.
//
// Reproducible: every output is computed by the same operations in the same order, whatever the
// batch size, the thread that computes it, and whatever else is computed beside it. A batch gives,
// to the bit, what its vectors give one by one.
#pragma once

#include <stdint.h>

extern "C" {

#define TOAST_API __attribute__((visibility("default")))

enum { TOAST_F32 = 0, TOAST_F16 = 1, TOAST_BF16 = 2 };  // element types
enum { TOAST_E8M0 = 3 };  // scales only: byte e is 2^(e - 127), 255 is NaN
enum { TOAST_I8 = 4 };  // KV cache only: a row's int8 values, then its float32 scale

// Bytes per element.
static inline int64_t toast_type_bytes(int32_t type) {
  return type == TOAST_F32 ? 4 : type <= TOAST_BF16 ? 2 : 1;
}

// A stack of matrices (experts, rows, columns), contiguous; a single matrix has experts = 1.
typedef struct {
  const void *weight;  // quantised: uint32 (experts, rows, columns * bits / 32); else of `type`
  const void *scales;  // quantised: (experts, rows, columns / group_size) of `type`; else NULL
  const void *biases;  // likewise: code q stands for scale * q + bias; NULL with TOAST_E8M0
  int64_t experts, rows, columns;
  int32_t bits;  // 2, 3, 4, 5, 6 or 8, packed as by MLX's affine quantisation; 0: not quantised
  int32_t group_size;  // columns that share a scale and a bias: 32, 64 or 128
  // TOAST_E8M0 is MLX's mxfp4: 4-bit E2M1 codes in groups of 32, scale * {0, .5, 1, 1.5, 2, 3, 4,
  // 6} and, from code 8 on, the negatives. Scales of 2^125 and more are out of range: infinities or
  // NaN.
  int32_t type;
} toast_matrix;

// Vectors (count, columns), each contiguous.
typedef struct {
  const void *data;
  int64_t count, stride;  // stride: elements from one vector to the next
  int32_t type;
} toast_vectors;

enum { TOAST_PAIRS = 12, TOAST_DIGITS = 16, TOAST_FLOATS = 32 };

// out[i] = matrix[expert[i]] x[vector[i]] for i < count: (count, rows) of out_type, contiguous.
//
// vector: NULL for 0, 1, 2, ...; expert: NULL for 0 (no mixture). activation_bits: the precision of
// activations against quantised weights, where the processor has products of bytes or words, with
// one scale per group: TOAST_DIGITS (16 bits) or TOAST_PAIRS (less for 4-bit weights alone: 12 bits
// with AVX-512, 12 and 11 in turn with AVX2 and AVX-VNNI); or TOAST_FLOATS, float32 activations.
//
// NaN comes out for an expert or a vector out of range, and for a vector that holds NaN or, with
// group scales, infinity. Returns 0; 1 for an unsupported matrix or type, 2 if out of memory.
TOAST_API int toast_multiply(const toast_matrix *matrix, const toast_vectors *x, int64_t count,
                   const uint32_t *vector, const uint32_t *expert, int32_t activation_bits,
                   void *out, int32_t out_type);

// Up to eight independent products, scheduled together. Consecutive ones with the same x (and the
// same quantisation) prepare its vectors once. To the bit what each gives alone.
typedef struct {
  const toast_matrix *matrix;
  const toast_vectors *x;
  int64_t count;
  const uint32_t *vector, *expert;
  int32_t activation_bits;
  void *out;
  int32_t out_type;
} toast_product;
TOAST_API int toast_multiply_all(const toast_product *products, int32_t n);

// Rows (batch, heads, positions, size), contiguous along the last axis.
typedef struct {
  const void *data;
  int64_t strides[3];  // elements per batch, head and position; 0 broadcasts
  int32_t type;        // TOAST_I8: strides are in bytes
} toast_rows;

enum { TOAST_ALL = 0, TOAST_CAUSAL = 1, TOAST_VISIBLE = 2, TOAST_ADDED = 3 };  // kinds of mask

// softmax(scale * q . k) v for every query (scaled dot-product attention, GQA).
typedef struct {
  toast_rows queries;  // (batch, heads, positions, key_size)
  toast_rows keys;     // (batch, key_heads, key_positions, key_size); key_heads divides heads
  toast_rows values;   // (batch, key_heads, key_positions, value_size)
  int64_t batch, heads, key_heads, positions, key_positions, key_size, value_size;
  float scale;
  int32_t masking;   // TOAST_CAUSAL: the last query sees all keys, each one before it one fewer;
                     // with more queries than keys, query i sees keys 0 to i
  const void *mask;  // (batch, heads, positions, key_positions). TOAST_VISIBLE: bytes, 0 hides a
                     // key. TOAST_ADDED: added to scores; the lowest number of its type, or -inf,
                     // hides a key
  int64_t mask_strides[3];
  int32_t mask_type;
  const float *sinks;  // (heads): attention sinks, a logit per head with a value of zero; or NULL
  float cap;           // logit soft-cap, applied before the mask: cap * tanh(score / cap); 0: none
} toast_attention;

// out: (batch, heads, positions, value_size) of out_type, with strides as in toast_rows. A query
// that sees no key gets the mean of all values, or zero if there are sinks; with TOAST_ADDED, what
// float32 arithmetic gives. A result depends only on what its query sees, counted from the first
// key that any query of its batch sees: the same bits in any batch, with any left padding, and
// however many queries there are per call. But a hidden infinity or NaN may make it NaN (0 * inf).
// With AVX2 and AVX-512 VNNI int8 keys and values meet 16-bit fixed-point operands: queries with a
// scale each, softmax weights with one per query and span. Returns 0; 1 for unsupported arguments
// or no keys; 2 if out of memory.
TOAST_API int toast_attend(const toast_attention *call, void *out, const int64_t *out_strides,
                           int32_t out_type);

// Several, scheduled together, of outputs with the same strides. To the bit what each gives alone.
TOAST_API int toast_attend_all(const toast_attention *calls, int32_t n, void *const *outs,
                               const int64_t *out_strides, int32_t out_type);

// The instruction set in use: "amx_int8", "avx512vbmi", "avx512vnni", "avxvnni", "avx2" or
// "portable"; on AArch64 "neon_i8mm", "neon_dotprod" or "neon". Choosing one that the processor
// lacks or the kernel does not grant returns 1 and changes nothing. Neither may be called while
// another thread computes.
TOAST_API const char *toast_instructions(void);
TOAST_API int toast_choose_instructions(const char *name);

// Number of compute threads, the caller included; at least 1. Not while another thread computes.
TOAST_API void toast_set_threads(int32_t count);
TOAST_API int32_t toast_threads(void);

}  // extern "C"
