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

// A stack of matrices (experts, rows, columns), contiguous; one matrix is a stack of one.
typedef struct {
  const void *weight;  // packed: uint32 (experts, rows, columns * bits / 32); else of `type`
  const void *scales;  // packed: (experts, rows, columns / group_size), of `type`; else NULL
  const void *biases;  // likewise: a number q stands for scale * q + bias
  int64_t experts, rows, columns;
  int32_t bits;        // 2, 3, 4, 6 or 8, as MLX packs its affine quantisation; 0: not packed
  int32_t group_size;  // 32, 64 or 128 columns have a scale in common
  int32_t type;
} toast_matrix;

// Vectors (count, columns), each contiguous.
typedef struct {
  const void *data;
  int64_t count, stride;  // stride: numbers from one to the next
  int32_t type;
} toast_vectors;

// out[i] = matrix[expert[i]] x[vector[i]] for i < count: (count, rows) of out_type, contiguous.
//
// vector: NULL for 0, 1, 2 ...; expert: NULL for 0. exact: float32 activations; else, where the
// processor multiplies bytes, packed weights meet activations in 16 bits, with a scale a group.
// What an expert or a vector that is not there would give is NaN, and so are all products of a
// vector that holds NaN or, in 16 bits, infinity.
// Returns 0; 1 for a matrix of another kind than above, 2 for no memory.
TOAST_API int toast_multiply(const toast_matrix *matrix, const toast_vectors *x, int64_t count,
                   const uint32_t *vector, const uint32_t *expert, int32_t exact, void *out,
                   int32_t out_type);

// The instruction sets in use: "avx512vbmi", "avx512vnni", "avx2", "portable". Choosing one that
// the processor has not returns 1, and changes nothing. Not while anybody computes.
TOAST_API const char *toast_instructions(void);
TOAST_API int toast_choose_instructions(const char *name);

// Threads that compute, the caller's included; 1 at least. Not while anybody computes.
TOAST_API void toast_set_threads(int32_t count);
TOAST_API int32_t toast_threads(void);

#ifdef __cplusplus
}
#endif
