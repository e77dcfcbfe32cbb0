// Products of weight matrices with vectors, for CPUs: the C interface. Plain memory in and out.
//
// Every number of a result is computed by the same operations in the same order, however many
// vectors there are, whichever thread computes it and whatever else is computed beside it: a batch
// gives, to the bit, what its vectors give one by one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOAST_API __attribute__((visibility("default")))

enum { TOAST_F32 = 0, TOAST_F16 = 1, TOAST_BF16 = 2 };  // types of numbers
enum { TOAST_E8M0 = 3 };  // of scales alone: a byte e stands for 2^(e - 127), 255 for NaN
enum { TOAST_I8 = 4 };                                  // of keys and values alone: signed bytes,
                                                        // and behind those of a row, in the next
                                                        // four, the float32 that they are
                                                        // multiplied by

// A stack of matrices (experts, rows, columns), contiguous; one matrix is a stack of one.
typedef struct {
  const void *weight;  // packed: uint32 (experts, rows, columns * bits / 32); else of `type`
  const void *scales;  // packed: (experts, rows, columns / group_size), of `type`; else NULL
  const void *biases;  // likewise: a number q stands for scale * q + bias; NULL with TOAST_E8M0
  int64_t experts, rows, columns;
  int32_t bits;        // 2, 3, 4, 5, 6 or 8, as MLX packs its affine quantisation; 0: not packed
  int32_t group_size;  // 32, 64 or 128 columns have a scale in common
  // TOAST_E8M0 (MLX's mxfp4): numbers of 4 bits in groups of 32 are codes of E2M1, which stand for
  // scale * 0, .5, 1, 1.5, 2, 3, 4, 6 and, from 8 on, -0, -.5 ...; scales of 2^125 and more are out
  // of reach, and give infinities or NaN.
  int32_t type;
} toast_matrix;

// Vectors (count, columns), each contiguous.
typedef struct {
  const void *data;
  int64_t count, stride;  // stride: numbers from one to the next
  int32_t type;
} toast_vectors;

enum { TOAST_PAIRS = 12, TOAST_DIGITS = 16, TOAST_FLOATS = 32 };

// out[i] = matrix[expert[i]] x[vector[i]] for i < count: (count, rows) of out_type, contiguous.
//
// vector: NULL for 0, 1, 2 ...; expert: NULL for 0. activation_bits: at least so many that packed
// weights meet where the processor multiplies bytes, with a scale a group: TOAST_PAIRS, which only
// weights of 4 bits gain by, or TOAST_DIGITS; or TOAST_FLOATS, float32 activations.
// What an expert or a vector that is not there would give is NaN, and so are all products of a
// vector that holds NaN or, with a scale a group, infinity.
// Returns 0; 1 for a matrix of another kind than above, 2 for no memory.
TOAST_API int toast_multiply(const toast_matrix *matrix, const toast_vectors *x, int64_t count,
                   const uint32_t *vector, const uint32_t *expert, int32_t activation_bits,
                   void *out, int32_t out_type);

// Such products, up to four, none of which waits for another, shared out together. What several do
// with the same x, one after another, is done once. To the bit what each gives by itself.
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

// Rows of numbers (batch, heads, positions, size), those of one row side by side.
typedef struct {
  const void *data;
  int64_t strides[3];  // numbers from one batch, head, position to the next; 0: all are one
  int32_t type;        // TOAST_I8: strides are in bytes
} toast_rows;

enum { TOAST_ALL = 0, TOAST_CAUSAL = 1, TOAST_VISIBLE = 2, TOAST_ADDED = 3 };  // kinds of masks

// Attention: for each query, the values weighted by softmax(scale * keys . query).
typedef struct {
  toast_rows queries;  // (batch, heads, positions, key_size)
  toast_rows keys;     // (batch, key_heads, key_positions, key_size); each for heads / key_heads
  toast_rows values;   // (batch, key_heads, key_positions, value_size)
  int64_t batch, heads, key_heads, positions, key_positions, key_size, value_size;
  float scale;
  int32_t masking;   // TOAST_CAUSAL: the last query sees all keys, each one before it one less
  const void *mask;  // (batch, heads, positions, key_positions): bytes, of which 0 hides a key; or
                     // numbers that are added to scores, the least of their type hiding it
  int64_t mask_strides[3];
  int32_t mask_type;
  const float *sinks;  // (heads): a score whose value is zero; NULL for none
  float cap;           // scores are cap * tanh of what they are over cap, before any mask; 0: not
} toast_attention;

// out: (batch, heads, positions, value_size) of out_type, strides as above. A query that sees no
// key has the mean of all values, or zero with a sink; where numbers are added that hide all keys,
// what float32 makes of them. Results depend on what a query sees from the first key on that any
// query of its batch sees, and on nothing else: they are the same bits in any batch, with any
// padding before, and however many queries are asked at a time. Where the processor multiplies
// bytes, what meets TOAST_I8 has 16 bits: queries with a step each, and weights in a span.
// Returns 0; 1 for what is not as above, or no keys; 2 for no memory.
TOAST_API int toast_attend(const toast_attention *call, void *out, const int64_t *out_strides,
                           int32_t out_type);

// The instruction sets in use: "amx_int8", "avx512vbmi", "avx512vnni", "avx2", "portable"; on
// 64-bit ARM "neon_i8mm", "neon_dotprod", "neon". Choosing one that the processor has not, or the
// system does not grant, returns 1, and changes nothing. Not while anybody computes.
TOAST_API const char *toast_instructions(void);
TOAST_API int toast_choose_instructions(const char *name);

// Threads that compute, the caller's included; 1 at least. Not while anybody computes.
TOAST_API void toast_set_threads(int32_t count);
TOAST_API int32_t toast_threads(void);

#ifdef __cplusplus
}
#endif
