// The C interface of rows.h, and how rows are split among threads.
#include "rows.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "product.h"
#include "sharing.h"

namespace toast {
namespace {

bool is_type(int type) { return type >= TOAST_F32 && type <= TOAST_BF16; }

int rotate(const toast_heads &x, const toast_rotation &r, void *out) {
  const RowInstructions &code = *instructions().rows;
  const int64_t tables = r.offset_count, positions = tables * x.length;
  auto table = memory<float>(positions * 2 * r.dims);
  if (!table) return 2;
  share(positions, r.dims * 4, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      float *cos = table.get() + i * 2 * r.dims;
      const float position = float(i % x.length) + float(r.offsets[i / x.length]);
      code.rotation_table(r, position, cos, cos + r.dims);
    }
  });
  share(x.batch * x.heads * x.length, x.size, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t l = i % x.length, h = i / x.length % x.heads, b = i / x.length / x.heads;
      const float *cos = table.get() + ((tables > 1 ? b : 0) * x.length + l) * 2 * r.dims;
      const int64_t from = b * x.strides[0] + h * x.strides[1] + l * x.strides[2];
      code.rotate(x, r, cos, cos + r.dims, from, i * x.size, out);
    }
  });
  return 0;
}

// Merges parts of a row, in order; the split does not depend on the number of threads.
Exponentials combine(const Exponentials *parts, int64_t count) {
  Exponentials all = {-INFINITY, 0, 0};
  for (int64_t i = 0; i < count; i++)
    if (parts[i].max > all.max) all.max = parts[i].max;
  for (int64_t i = 0; i < count; i++) {
    const bool is_max = parts[i].max == all.max;  // both may be infinite
    const float d = is_max ? 0 : fmaxf(parts[i].max - all.max, MIN_EXPONENT), scale = expf(d);
    all.sum += parts[i].sum * scale;
    all.weighted += (parts[i].weighted + parts[i].sum * d) * scale;
  }
  return all;
}

int64_t parts_of(int64_t columns) { return (columns + CHUNK - 1) / CHUNK; }

// Calls work(i, row, first element, elements) for all parts of CHUNK of all rows, i in their order.
template <class Work>
void share_parts(const toast_vectors &x, int64_t columns, const Work &work) {
  const int64_t parts = parts_of(columns);
  share(x.count * parts, columns < CHUNK ? columns : CHUNK, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t from = i % parts * CHUNK;
      work(i, i / parts, from, std::min(columns - from, CHUNK));
    }
  });
}

// Calls done(row, Exponentials, those of its parts) for each row, in order; false if out of memory.
template <class Done>
bool reduce_rows(const toast_vectors &x, int64_t columns, const Done &done) {
  const RowInstructions &code = *instructions().rows;
  const int64_t parts = parts_of(columns);
  auto found = memory<Exponentials>(x.count * parts);
  if (!found) return false;
  share_parts(x, columns, [&](int64_t i, int64_t row, int64_t from, int64_t count) {
    found[i] = code.exponentials(x.type, x.data, row * x.stride + from, count);
  });
  for (int64_t row = 0; row < x.count; row++)
    done(row, combine(&found[row * parts], parts), &found[row * parts]);
  return true;
}

// The first index in a row of its largest number, -1 if there is none. max_of(part): the largest in
// a part of CHUNK.
template <class Max>
int64_t find_largest(const toast_vectors &x, int64_t columns, int64_t row, float max,
                     const Max &max_of) {
  for (int64_t from = 0; from < columns; from += CHUNK) {
    if (max_of(from / CHUNK) != max) continue;  // a part of NaN only has -inf too
    const int64_t at = row * x.stride + from, count = std::min(columns - from, CHUNK);
    const int64_t found = instructions().rows->find(x.type, x.data, at, count, max);
    if (found >= 0) return from + found;
  }
  return -1;
}

int softmax(const toast_vectors &x, int64_t columns, void *out, int out_type) {
  auto rows = memory<Exponentials>(x.count);
  if (!rows) return 2;
  auto keep = [&](int64_t row, Exponentials sums, auto) { rows[row] = sums; };
  if (!reduce_rows(x, columns, keep)) return 2;
  share_parts(x, columns, [&](int64_t, int64_t row, int64_t from, int64_t count) {
    instructions().rows->softmax(x.type, x.data, row * x.stride + from, count, rows[row], out,
                                 out_type, row * columns + from);
  });
  return 0;
}

int largest(const toast_vectors &x, int64_t columns, uint32_t *out) {
  const int64_t parts = parts_of(columns);
  auto max = memory<float>(x.count * parts);
  if (!max) return 2;
  share_parts(x, columns, [&](int64_t i, int64_t row, int64_t from, int64_t count) {
    max[i] = instructions().rows->max(x.type, x.data, row * x.stride + from, count);
  });
  for (int64_t row = 0; row < x.count; row++) {
    const float *own = &max[row * parts], number = *std::max_element(own, own + parts);
    auto max_of = [&](int64_t part) { return own[part]; };
    const int64_t found = find_largest(x, columns, row, number, max_of);
    out[row] = uint32_t(found < 0 ? 0 : found);
  }
  return 0;
}

// Monotone map to uint32: zeros are equal, NaN is above all.
uint32_t rank(int type, const void *x, int64_t at) {
  const bool wide = type == TOAST_F32;
  const uint32_t bits = wide ? static_cast<const uint32_t *>(x)[at]
                             : static_cast<const uint16_t *>(x)[at];
  const uint32_t sign = wide ? 1u << 31 : 1u << 15, size = bits & (sign - 1);
  const uint32_t infinity = wide ? 0x7f800000 : type == TOAST_F16 ? 0x7c00 : 0x7f80;
  return size > infinity ? UINT32_MAX : bits & sign ? sign - size : sign + size;
}

// Sorts rank and index as one integer: contiguous, and without ties.
int partition(const toast_vectors &x, int64_t columns, int64_t kth, uint32_t *out) {
  auto ranks = memory<uint64_t>(x.count * columns);
  if (!ranks) return 2;
  share(x.count, columns, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      uint64_t *own = ranks.get() + row * columns;
      for (int64_t i = 0; i < columns; i++)
        own[i] = uint64_t(rank(x.type, x.data, row * x.stride + i)) << 32 | uint64_t(i);
      std::nth_element(own, own + kth, own + columns);
      for (int64_t i = 0; i < columns; i++) out[row * columns + i] = uint32_t(own[i]);
    }
  });
  return 0;
}

int normalise(const Norm &norm) {
  if (!is_type(norm.x->type) || !is_type(norm.weight_type) || !is_type(norm.out_type)) return 1;
  const RowInstructions &code = *instructions().rows;
  share(norm.x->count, norm.columns, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) code.norm(norm, row);
  });
  return 0;
}

}  // namespace
}  // namespace toast

extern "C" {

int toast_rms_norm(const toast_vectors *x, int64_t columns, const void *weight,
                   int32_t weight_type, float plus, float eps, void *out, int32_t out_type) {
  return toast::normalise({x, columns, weight, weight_type, plus, eps, out, out_type, false,
                           nullptr});
}

int toast_layer_norm(const toast_vectors *x, int64_t columns, const void *weight, const void *bias,
                     int32_t weight_type, float eps, void *out, int32_t out_type) {
  const float plus = weight ? 0 : 1;
  return toast::normalise({x, columns, weight, weight_type, plus, eps, out, out_type, true, bias});
}

int toast_rotate(const toast_heads *x, const toast_rotation *rotation, void *out) {
  const toast_rotation &r = *rotation;
  const bool offsets = r.offset_count == 1 || r.offset_count == x->batch;
  if (!toast::is_type(x->type) || r.dims <= 0 || r.dims % 2 || r.dims > x->size || !offsets)
    return 1;
  return toast::rotate(*x, r, out);
}

int toast_append(const toast_heads *x, int64_t positions, int64_t first, void *out,
                 const int64_t *out_strides, int32_t out_type) {
  using namespace toast;
  const int64_t length = x->length, heads = x->heads;
  const bool bytes = out_type == TOAST_I8;
  if (!is_type(x->type) || !(bytes || is_type(out_type))) return 1;
  if (first < 0 || first + length > positions) return 1;
  if (!x->size) return 0;
  const RowInstructions &code = *instructions().rows;
  share(x->batch * heads * length, x->size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t l = i % length, h = i / length % heads, b = i / length / heads;
      const int64_t from = b * x->strides[0] + h * x->strides[1] + l * x->strides[2];
      const int64_t to = b * out_strides[0] + h * out_strides[1] + (first + l) * out_strides[2];
      code.store(x->type, x->data, from, x->size, out, out_type, to);
    }
  });
  return 0;
}

int toast_gate(const void *gate, const void *x, int64_t count, int32_t type, int32_t activation,
               void *out) {
  using namespace toast;
  if (!is_type(type) || activation < TOAST_SILU || activation > TOAST_RELU2) return 1;
  const Gate all = {gate, x, type, activation, out};
  const RowInstructions &code = *instructions().rows;
  share(count, 1, [&](int64_t first, int64_t end) { code.gate(all, first, end); });
  return 0;
}

int toast_add_rows(float *x, int64_t count, int64_t columns, const float *rows, int64_t stack,
                   const uint32_t *which) {
  toast::share(count, columns, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t row = which ? which[i] : 0;
      for (int64_t k = 0; row < stack && k < columns; k++)
        x[i * columns + k] += rows[row * columns + k];
    }
  });
  return 0;
}

int toast_convolve(const toast_convolution *convolution, void *out, int32_t out_type) {
  using namespace toast;
  const toast_convolution &c = *convolution;
  const bool known = is_type(c.type) && is_type(c.weight_type) && is_type(out_type);
  if (!known || c.kernel <= 0 || c.kernel > MAX_KERNEL) return 1;
  const RowInstructions &code = *instructions().rows;
  const int64_t parts = (c.channels + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK;
  share(c.batch * parts, CHANNEL_BLOCK * c.kernel * (c.length + 1),
        [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const int64_t from = i % parts * CHANNEL_BLOCK;
      code.convolve(c, i / parts, from, std::min(from + CHANNEL_BLOCK, c.channels), out, out_type);
    }
  });
  return 0;
}

int toast_softmax(const toast_vectors *x, int64_t columns, void *out, int32_t out_type) {
  if (!toast::is_type(x->type) || !toast::is_type(out_type)) return 1;
  return toast::softmax(*x, columns, out, out_type);
}

int toast_log_sum_exp(const toast_vectors *x, int64_t columns, float *out) {
  if (!toast::is_type(x->type)) return 1;
  return toast::reduce_rows(*x, columns, [&](int64_t row, auto sums, auto) {
    const bool ends = sums.max == INFINITY || !sums.sum;
    out[row] = ends ? sums.max : sums.max + logf(sums.sum);
    // The sum beside infinity is none with or without NaN in the row.
    for (int64_t k = 0; sums.max == INFINITY && k < columns; k++)
      if (toast::rank(x->type, x->data, row * x->stride + k) == UINT32_MAX) out[row] = NAN;
  }) ? 0 : 2;
}

int toast_distribution(const toast_vectors *x, int64_t columns, float *out) {
  if (!toast::is_type(x->type)) return 1;
  return toast::reduce_rows(*x, columns, [&](int64_t row, auto sums, auto *parts) {
    const float log_sum = sums.sum ? logf(sums.sum) : NAN;
    out[4 * row] = sums.max;
    out[4 * row + 1] = log_sum;
    out[4 * row + 2] = log_sum - sums.weighted / sums.sum;
    auto max_of = [&](int64_t part) { return parts[part].max; };
    out[4 * row + 3] = float(toast::find_largest(*x, columns, row, sums.max, max_of));
  }) ? 0 : 2;
}

int toast_largest(const toast_vectors *x, int64_t columns, uint32_t *out) {
  if (!toast::is_type(x->type) || columns <= 0 || columns > UINT32_MAX) return 1;
  return toast::largest(*x, columns, out);
}

int toast_partition(const toast_vectors *x, int64_t columns, int64_t kth, uint32_t *out) {
  if (!toast::is_type(x->type) || kth < 0 || kth >= columns || columns > UINT32_MAX) return 1;
  return toast::partition(*x, columns, kth, out);
}

int toast_quantise(const toast_vectors *x, int64_t columns, void *out) {
  if (columns <= 0) return 1;
  const toast_heads rows = {x->data, 1, 1, x->count, columns, {0, 0, x->stride}, x->type};
  const int64_t strides[3] = {0, 0, columns + int64_t(sizeof(float))};
  return toast_append(&rows, x->count, 0, out, strides, TOAST_I8);
}

int toast_dequantise(const void *rows, int64_t count, int64_t columns, float *out) {
  if (columns <= 0) return 1;
  const toast::RowInstructions &code = *toast::instructions().rows;
  const int64_t bytes = columns + int64_t(sizeof(float));
  toast::share(count, columns, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
      code.dequantise(static_cast<const char *>(rows) + row * bytes, columns, out + row * columns);
  });
  return 0;
}

int toast_blend(const toast_vectors *x, int64_t columns, int64_t group, const float *weights,
                const float *more, const float *gates, float *out) {
  using namespace toast;
  if (!is_type(x->type) || group <= 0 || x->count % group) return 1;
  const WeightedSum all = {x, columns, group, weights, out, TOAST_F32};
  const RowInstructions &code = *instructions().rows;
  share(x->count / group, columns * (group + 1), [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      code.weighted_sum(all, row);
      const float gate = 1 / (1 + expf(-gates[row]));
      for (int64_t k = row * columns; k < (row + 1) * columns; k++) out[k] += gate * more[k];
    }
  });
  return 0;
}

int toast_weighted_sums(const toast_vectors *x, int64_t columns, int64_t group,
                        const float *weights, void *out, int32_t out_type) {
  using namespace toast;
  if (!is_type(x->type) || !is_type(out_type) || group <= 0 || x->count % group) return 1;
  const WeightedSum all = {x, columns, group, weights, out, out_type};
  const RowInstructions &code = *instructions().rows;
  share(x->count / group, columns * group, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) code.weighted_sum(all, row);
  });
  return 0;
}

}  // extern "C"
