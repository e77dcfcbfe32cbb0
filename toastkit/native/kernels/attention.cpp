// Attention: which keys each query sees, and how the work is split among threads.
#include "attention.h"

#include <string.h>

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "product.h"
#include "sharing.h"

namespace toast {
namespace {

constexpr int64_t MIN_TILES = 64;           // fewer tiles are split by span too (Flash-Decoding)
constexpr int64_t SERIAL_MACS = 1 << 17;    // too few multiply-adds for a second thread
constexpr int64_t SHARED_MACS = 1 << 22;    // of several calls, one with fewer is one thread's
constexpr int64_t SERIAL_QUERY_TILES = 16;  // fewer tiles are prepared serially

bool is_float(const toast_rows &rows) {
  return rows.type >= TOAST_F32 && rows.type <= TOAST_BF16;
}

bool is_cacheable(const toast_rows &rows) { return is_float(rows) || rows.type == TOAST_I8; }

bool is_supported(const toast_attention &a) {
  const bool sizes = a.batch >= 0 && a.positions >= 0 && a.key_positions > 0 &&
                     a.key_positions < INT32_MAX && a.key_size > 0 && a.value_size > 0;
  const bool heads = a.key_heads > 0 && a.heads >= 0 && a.heads % a.key_heads == 0;
  const bool mask = a.masking >= TOAST_ALL && a.masking <= TOAST_ADDED &&
                    (a.masking < TOAST_VISIBLE || a.mask) &&
                    (a.masking != TOAST_ADDED ||
                     (a.mask_type >= TOAST_F32 && a.mask_type <= TOAST_BF16));
  return sizes && heads && mask && is_float(a.queries) && is_cacheable(a.keys) &&
         is_cacheable(a.values);
}

// Whether an additive mask hides the key: the most negative finite number of its type, or -inf.
bool is_mask_minimum(int type, const void *p, int64_t i) {
  if (type == TOAST_F32)
    return static_cast<const float *>(p)[i] <= std::numeric_limits<float>::lowest();
  const uint16_t bits = static_cast<const uint16_t *>(p)[i];
  return type == TOAST_F16 ? bits == 0xfbff || bits == 0xfc00 : bits == 0xff7f || bits == 0xff80;
}

Range range_of(const toast_attention &a, int64_t batch, int64_t head, int64_t position) {
  const int64_t keys = a.key_positions;
  if (a.masking == TOAST_ALL) return {0, int32_t(keys - 1), Range::DENSE};
  if (a.masking == TOAST_CAUSAL) {
    const int64_t last = std::max<int64_t>(keys - a.positions, 0) + position;
    return {0, int32_t(std::min(last, keys - 1)), Range::DENSE};
  }
  const int64_t at = batch * a.mask_strides[0] + head * a.mask_strides[1] +
                     position * a.mask_strides[2];
  auto bytes = static_cast<const uint8_t *>(a.mask) + at;
  auto is_hidden = [&](int64_t key) {
    return a.masking == TOAST_VISIBLE ? !bytes[key]
                                     : is_mask_minimum(a.mask_type, a.mask, at + key);
  };
  int64_t first = 0, last = keys - 1;
  while (first < keys && is_hidden(first)) first++;
  const bool empty = first == keys;
  if (empty) return {0, int32_t(last), Range::EMPTY};
  while (is_hidden(last)) last--;
  const bool holes = a.masking == TOAST_VISIBLE && memchr(bytes + first, 0, last - first);
  return {int32_t(first), int32_t(last), holes ? Range::HOLES : Range::DENSE};
}

// What every query sees, and where each batch's spans begin.
struct Visibility {
  std::vector<Range> ranges;
  std::vector<int64_t> origin;
  int64_t batches, heads;

  Visibility(const toast_attention &a, Helpers help) {
    const bool mask = a.masking >= TOAST_VISIBLE;
    batches = mask && a.mask_strides[0] ? a.batch : 1;
    heads = mask && a.mask_strides[1] ? a.heads : 1;
    ranges.resize(batches * heads * a.positions);
    share_each(mask ? help : Helpers::NONE, batches * heads * a.positions, [&](int64_t i) {
      const int64_t position = i % a.positions, rest = i / a.positions;
      ranges[i] = range_of(a, rest / heads, rest % heads, position);
    });
    const int64_t each = heads * a.positions;
    for (int64_t batch = 0; batch < a.batch; batch++) {
      const int64_t begin = batches > 1 ? batch * each : 0;
      int64_t first = a.key_positions;
      for (int64_t i = begin; i < begin + each; i++)
        if (ranges[i].kind != Range::EMPTY) first = std::min<int64_t>(first, ranges[i].first);
      origin.push_back(first == a.key_positions ? 0 : first);
    }
  }
};

// The spans [first, end) that any row of a tile sees; span 0 begins at the origin. A span starts at
// the first key that a row sees, or a few before it, and ends at the last.
struct Spans {
  int64_t first, end, origin;
  int64_t from, to;  // keys that any row sees

  int64_t begin_of(int64_t span) const {
    const int64_t begin = std::max<int64_t>(origin + span * SPAN, 0);
    // By whole rounds of SUM_CHAINS, so that keys stay in their chains.
    return begin + std::max<int64_t>(from - begin, 0) / SUM_CHAINS * SUM_CHAINS;
  }
  int64_t end_of(int64_t span) const { return std::min(origin + (span + 1) * SPAN, to); }
};

Spans spans_of(const Attention &a, const Tile &tile) {
  int64_t first = a.call->key_positions, last = 0;
  for (int64_t row = tile.first; row < tile.first + tile.rows; row++) {
    const Range range = a.range(tile.batch, tile.head * a.repeats + row % a.repeats,
                                row / a.repeats);
    first = std::min<int64_t>(first, range.first);
    last = std::max<int64_t>(last, range.last);
  }
  const int64_t origin = a.origin[tile.batch];
  auto span = [&](int64_t key) {  // floor, also below the origin
    return key >= origin ? (key - origin) / SPAN : -((origin - key + SPAN - 1) / SPAN);
  };
  return {span(first), span(last) + 1, origin, first, last + 1};
}

// Whether the heads of a position are adjacent in memory, as in a session file.
bool is_position_major(const toast_rows &rows, int64_t heads, int64_t size) {
  const int64_t row = size + (rows.type == TOAST_I8 ? int64_t(sizeof(float)) : 0);
  return rows.strides[1] == row && rows.strides[2] >= heads * row;
}

// Key heads per tile. Adjacent ones share a tile, so that memory is read sequentially, as long as
// all threads have work.
int64_t heads_of_tile(const Attention &a, const AttentionCode &code) {
  const toast_attention &call = *a.call;
  if (a.range_strides[1] || !is_position_major(call.keys, call.key_heads, call.key_size) ||
      !is_position_major(call.values, call.key_heads, call.value_size))
    return 1;
  int64_t heads = std::min(code.tile_heads(a), call.key_heads);
  const int64_t spans = call.batch * (call.key_positions / SPAN);
  while (heads > 1 && spans * (call.key_heads / heads) < 4 * threads()) heads /= 2;
  return heads;
}

struct Work {
  Tile tile;
  Spans spans;
  int64_t spans_before;  // of earlier tiles
};

// The tiles of a call, and their memory.
struct Plan {
  const Attention &a;
  const AttentionCode &code;
  Helpers help;
  std::vector<Work> work;
  int64_t spans = 0;     // of all tiles
  int64_t rows, floats;  // per tile; floats: of its Partial
  int64_t query_bytes;   // per tile, prepared; or 0

  Plan(const Attention &a, const AttentionCode &code, Helpers help)
      : a(a), code(code), help(help) {
    const toast_attention &call = *a.call;
    const int64_t tile_rows = code.tile_rows(a), tile_heads = heads_of_tile(a, code);
    for (int64_t batch = 0; batch < call.batch; batch++)
      for (int64_t head = 0; head < call.key_heads; head += tile_heads)
        for (int64_t first = 0; first < a.rows; first += tile_rows) {
          const Tile tile = {batch, head, first, std::min(tile_rows, a.rows - first),
                             std::min(tile_heads, call.key_heads - head), nullptr};
          work.push_back({tile, spans_of(a, tile), spans});
          spans += work.back().spans.end - work.back().spans.first;
        }
    rows = tile_heads * tile_rows, floats = rows * (1 + a.row_floats);
    query_bytes = code.prepared_bytes(a, tile_rows, tile_heads);
  }

  int64_t tiles() const { return int64_t(work.size()); }
  Partial partial(float *memory) const { return {memory, memory + rows}; }

  bool attend(const Work &one, int64_t span, Partial out) const {
    return code.attend(a, one.tile, one.spans.begin_of(span), one.spans.end_of(span), out);
  }
};

// A thread takes all spans of a tile, in order.
bool attend_tile(const Plan &plan, Work one) {
  auto memory = static_cast<float *>(scratch(SUMS, 2 * plan.floats * sizeof(float)));
  if (!memory) return false;
  if (plan.query_bytes) {
    auto queries = static_cast<char *>(scratch(QUERIES, plan.query_bytes));
    if (!queries) return false;
    plan.code.prepare(plan.a, one.tile, queries);
    one.tile.queries = queries;
  }
  const Partial to = plan.partial(memory), from = plan.partial(memory + plan.floats);
  for (int64_t span = one.spans.first; span < one.spans.end; span++) {
    const bool later = span > one.spans.first;
    if (!plan.attend(one, span, later ? from : to)) return false;
    if (later) plan.code.merge(plan.a, one.tile.heads * one.tile.rows, to, from);
  }
  plan.code.finish(plan.a, one.tile, to);
  return true;
}

// Spans are shared out and merged at the end.
bool attend_spans(Plan &plan) {
  const Attention &a = plan.a;
  const int64_t tiles = plan.tiles(), floats = plan.floats, bytes = plan.query_bytes;
  auto memory = static_cast<float *>(scratch(PARTS, plan.spans * floats * sizeof(float)));
  auto queries = static_cast<char *>(bytes ? scratch(QUERIES, tiles * bytes) : nullptr);
  if (!memory || (bytes && !queries)) return false;
  const Helpers help = tiles < SERIAL_QUERY_TILES ? Helpers::NONE : plan.help;
  share_each(help, bytes ? tiles : 0, [&](int64_t i) {
    plan.code.prepare(a, plan.work[i].tile, queries + i * bytes);
    plan.work[i].tile.queries = queries + i * bytes;
  });
  // With position-major keys and several tiles, take a span of all heads, which share its pages,
  // before the next span.
  const Spans &first = plan.work[0].spans;
  const int64_t each = first.end - first.first;
  const toast_rows &keys = a.call->keys;
  const bool by_position = keys.strides[2] > keys.strides[1] && plan.spans == tiles * each;
  const bool done = share_checked(plan.help, plan.spans, [&](int64_t n) {
    const int64_t i = by_position ? n % tiles * each + n / tiles : n;
    auto one = std::upper_bound(plan.work.begin(), plan.work.end(), i,
                                [](int64_t n, const Work &w) { return n < w.spans_before; }) - 1;
    const int64_t span = one->spans.first + i - one->spans_before;
    return plan.attend(*one, span, plan.partial(memory + i * floats));
  });
  if (!done) return false;
  share_each(plan.help, tiles, [&](int64_t i) {
    const Work &one = plan.work[i];
    float *all = memory + one.spans_before * floats;
    for (int64_t s = 1; s < one.spans.end - one.spans.first; s++)
      plan.code.merge(a, one.tile.heads * one.tile.rows, plan.partial(all),
                      plan.partial(all + s * floats));
    plan.code.finish(a, one.tile, plan.partial(all));
  });
  return true;
}

bool attend(const Attention &a, const AttentionCode &code, Helpers help) {
  Plan plan(a, code, help);
  if (plan.tiles() < MIN_TILES && plan.spans > plan.tiles()) return attend_spans(plan);
  return share_checked(help, plan.tiles(),
                       [&](int64_t i) { return attend_tile(plan, plan.work[i]); });
}

double multiply_adds(const toast_attention &call) {
  return double(call.batch) * call.heads * call.positions * call.key_positions *
         (call.key_size + call.value_size);
}

// As toast_attend, of a supported call.
bool attend(const toast_attention &call, void *out, const int64_t *out_strides, int32_t out_type,
            Helpers help) {
  const int64_t repeats = call.heads / call.key_heads, rows = repeats * call.positions;
  if (!rows || !call.batch) return true;
  const AttentionCode &code = *instructions().attention;
  const Visibility seen(call, help);
  const Attention a = {
      &call, out, out_type, out_strides, repeats, rows, code.row_floats(call.value_size),
      seen.ranges.data(),
      {seen.batches > 1 ? seen.heads * call.positions : 0, seen.heads > 1 ? call.positions : 0},
      seen.origin.data(),
  };
  return attend(a, code, help);
}

}  // namespace
}  // namespace toast

extern "C" int toast_attend_all(const toast_attention *calls, int32_t n, void *const *outs,
                                const int64_t *out_strides, int32_t out_type) {
  using namespace toast;
  double all = 0;
  for (int32_t i = 0; i < n; i++) {
    if (!is_supported(calls[i])) return 1;
    all += multiply_adds(calls[i]);
  }
  if (out_type < TOAST_F32 || out_type > TOAST_BF16) return 1;
  const Helpers help = helpers(all, SERIAL_MACS);
  auto is_shared = [&](int64_t i) { return n == 1 || multiply_adds(calls[i]) >= SHARED_MACS; };
  auto attend_one = [&](int64_t i, Helpers who) {
    try {
      return attend(calls[i], outs[i], out_strides, out_type, who);
    } catch (const std::bad_alloc &) {
      return false;
    }
  };
  int32_t small = 0;
  for (int32_t i = 0; i < n; i++) {
    if (!is_shared(i)) small++;
    else if (!attend_one(i, help)) return 2;
  }
  const bool done = !small || share_checked(help, n, [&](int64_t i) {
    return is_shared(i) || attend_one(i, Helpers::NONE);
  });
  return done ? 0 : 2;
}

extern "C" int toast_attend(const toast_attention *call, void *out, const int64_t *out_strides,
                            int32_t out_type) {
  return toast_attend_all(call, 1, &out, out_strides, out_type);
}
