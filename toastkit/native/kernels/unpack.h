// Rows of a matrix as float32, and packed numbers as bytes.
#pragma once

#include "lanes.h"
#include "product.h"

namespace {

// Bytes from one packed row to the next.
INLINE int64_t row_bytes(const toast_matrix &m) {
  if (m.bits) return m.columns * m.bits / 8;
  return m.columns * (m.type == TOAST_F32 ? 4 : 2);
}

INLINE const uint8_t *row_at(const toast_matrix &m, int64_t row) {
  return static_cast<const uint8_t *>(m.weight) + row * row_bytes(m);
}

// Packed rows are one string of bits, the first number in the lowest of the first byte: eight
// numbers fill `BITS` bytes.
template <int BITS>
INLINE void spread(const uint8_t *packed, int64_t columns, uint8_t *out) {
  constexpr uint64_t ONES = 0x0101010101010101u * ((1u << BITS) - 1);
  for (int64_t k = 0; k < columns; k += 8, packed += BITS, out += 8) {
    uint64_t bits = 0, bytes = 0;
    if ((columns - k) * BITS >= 64) {  // what comes after the eight is cut off below
      memcpy(&bits, packed, 8);
    } else {
      memcpy(&bits, packed, BITS);
    }
#if defined(__BMI2__)
    bytes = _pdep_u64(bits, ONES);
#else
    for (int i = 0; i < 8; i++) bytes |= (bits >> i * BITS) << i * 8 & ONES & 0xffull << i * 8;
#endif
    memcpy(out, &bytes, 8);
  }
}

// The numbers of a packed row, a byte each. columns: a multiple of 32.
INLINE void unpack_bytes(const toast_matrix &m, const uint8_t *row, uint8_t *out) {
  switch (m.bits) {
    case 2: return spread<2>(row, m.columns, out);
    case 3: return spread<3>(row, m.columns, out);
    case 4: return spread<4>(row, m.columns, out);
    case 6: return spread<6>(row, m.columns, out);
    default: memcpy(out, row, m.columns);
  }
}

INLINE float number_at(int type, const void *p, int64_t i) {
  if (type == TOAST_F32) return static_cast<const float *>(p)[i];
  U16 v = U16{} + static_cast<const uint16_t *>(p)[i];
  return (type == TOAST_F16 ? from_f16(v) : from_bf16(v))[0];
}

// A row as float32, with zeros up to a multiple of LANES. bytes: room for a packed row's numbers.
INLINE void widen_row(const toast_matrix &m, int64_t row, uint8_t *bytes, float *out) {
  const uint8_t *from = row_at(m, row);
  if (!m.bits) {
    for (int64_t k = 0; k < m.columns; k += LANES)
      store(out + k, some_numbers_at(m.type, from, k, int(m.columns - k)));
    return;
  }
  unpack_bytes(m, from, bytes);
  const int64_t groups = m.columns / m.group_size;
  for (int64_t g = 0; g < groups; g++) {
    F32 scale = all(number_at(m.type, m.scales, row * groups + g));
    F32 bias = all(number_at(m.type, m.biases, row * groups + g));
    for (int64_t k = g * m.group_size; k < (g + 1) * m.group_size; k += LANES)
      store(out + k, multiply_add(from_bytes(bytes + k), scale, bias));
  }
}

}  // namespace
