// The C interface: instruction-set dispatch, and how products are split among threads.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "memory.h"
#include "product.h"
#include "sharing.h"

namespace toast {
namespace {

#if defined(__x86_64__)
const Instructions *const ALL[] = {&amx_int8, &avx512vbmi, &avx512vnni, &avxvnni, &avx2, &portable};
#else
const Instructions *const ALL[] = {&neon_i8mm, &neon_dotprod, &neon};
#endif

constexpr int64_t MAX_BYTES = 256 << 10;         // weights per chunk, for GEMV
constexpr int64_t MIN_BYTES = 64 << 10;          // likewise
constexpr int CHUNKS_PER_THREAD = 8;             // target for GEMV, within those bounds
constexpr int64_t CHUNK_ROWS = 64;               // for GEMM
constexpr int64_t BATCH_CHUNKS_PER_THREAD = 32;  // target for GEMM
constexpr int64_t MAX_PANEL_TILES = 4;           // of CHUNK_ROWS, that meet a panel of columns
constexpr int64_t PANEL_CHUNKS_PER_THREAD = 8;   // at least, where a chunk has several tiles
constexpr int64_t MIN_ROWS = 16;                 // a multiple of every tile height
constexpr int64_t SERIAL_MACS = 1 << 18;         // too few multiply-adds for a second thread

constexpr int MAX_PRODUCTS = 8;  // per call

std::atomic<const Instructions *> chosen{nullptr};

bool is_supported(const toast_matrix &m) {
  if (m.type < TOAST_F32 || m.type > TOAST_E8M0 || m.columns < 0 || m.rows < 0) return false;
  if (m.type == TOAST_E8M0 && (m.bits != 4 || m.group_size != 32)) return false;
  if (!m.bits) return true;
  bool bits = (m.bits >= 2 && m.bits <= 6) || m.bits == 8;
  bool group_size = m.group_size == 32 || m.group_size == 64 || m.group_size == 128;
  return bits && group_size && m.columns % m.group_size == 0;
}

// NaN in float32, float16 or bfloat16.
void fill_nan(const Product &p, int64_t output) {
  const int64_t rows = p.matrix->rows;
  for (int64_t n = output * rows; n < (output + 1) * rows; n++) {
    if (p.out_type == TOAST_F32) {
      static_cast<uint32_t *>(p.out)[n] = 0x7fc00000;
    } else {
      static_cast<uint16_t *>(p.out)[n] = p.out_type == TOAST_F16 ? 0x7e00 : 0x7fc0;
    }
  }
}

// Sorts results by expert, stably (a counting sort). begin: (experts + 1), zeroed on entry; results
// of expert e are outputs[begin[e]] up to outputs[begin[e + 1]]. Invalid ones are set to NaN.
void sort_by_expert(const Product &p, int64_t count, const uint32_t *expert, int64_t *begin,
                    uint32_t *outputs) {
  const int64_t experts = p.matrix->experts, vectors = p.x->count;
  auto exists = [&](int64_t i) {
    return (!expert || expert[i] < experts) && (p.vector ? p.vector[i] : i) < vectors;
  };
  for (int64_t i = 0; i < count; i++)
    if (exists(i)) begin[(expert ? expert[i] : 0) + 1]++;
  for (int64_t e = 0; e < experts; e++) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < count; i++) {
    if (exists(i)) {
      outputs[begin[expert ? expert[i] : 0]++] = uint32_t(i);
    } else {
      fill_nan(p, i);
    }
  }
  for (int64_t e = experts; e > 0; e--) begin[e] = begin[e - 1];
  begin[0] = 0;
}

// A product and how it is split: batch_count batches, each of `chunks` chunks of `rows` rows.
struct Task {
  const toast_product *request;
  Product p;
  Memory<int64_t> begin;
  Memory<uint32_t> outputs;
  Memory<char> prepared;
  Memory<ExpertBatch> batches;
  int64_t batch_count, batch_size, rows, chunks;
};

// Whether both want the same prepared vectors.
bool is_prepared_as(const toast_product &a, const toast_product &b) {
  const toast_matrix &m = *a.matrix, &n = *b.matrix;
  return a.x == b.x && a.activation_bits == b.activation_bits && m.type == n.type &&
         m.columns == n.columns && m.bits == n.bits && m.group_size == n.group_size;
}

// Prepares the vectors, or takes those of the previous task. False if out of memory.
bool prepare(Task &task, const Task *before, Helpers help) {
  Product &p = task.p;
  if (before && is_prepared_as(*task.request, *before->request)) {
    p.prepared = before->p.prepared, p.prepared_stride = before->p.prepared_stride;
    return true;
  }
  const Instructions &code = instructions();
  p.prepared_stride = code.prepared_bytes(p);
  task.prepared = memory<char>(p.x->count * p.prepared_stride);
  if (!(p.prepared = task.prepared.get())) return false;
  if (p.x->count < 8) help = Helpers::NONE;
  share_each(help, p.x->count, [&](int64_t row) { code.prepare(p, row); });
  return true;
}

// Whether both have the same batches of the same prepared vectors, given their sizes.
bool is_batched_as(const Task &a, const Task &b) {
  auto all = [](const toast_product &p) { return !p.vector && !p.expert; };
  return a.p.prepared == b.p.prepared && a.batch_size == b.batch_size &&
         a.request->count == b.request->count && all(*a.request) && all(*b.request);
}

// Groups the results by expert into batches, and rows into chunks. before: the previous task, or
// NULL. False if out of memory.
bool split_into_chunks(Task &task, const Task *before) {
  const toast_product &request = *task.request;
  const Product &p = task.p;
  const toast_matrix &m = *p.matrix;
  const int64_t count = request.count;
  task.begin = memory<int64_t>(m.experts + 1), task.outputs = memory<uint32_t>(count);
  if (!task.begin || !task.outputs) return false;
  int64_t *begin = task.begin.get();
  memset(begin, 0, (m.experts + 1) * sizeof(int64_t));
  sort_by_expert(p, count, request.expert, begin, task.outputs.get());
  // A chunk is some rows of an expert times a batch of vectors: the fewer the rows, the smaller the
  // batches, so that there are enough chunks for all threads.
  const int64_t parts = BATCH_CHUNKS_PER_THREAD * threads() * CHUNK_ROWS / (m.rows + 1) + 1;
  const int64_t max_batch = in_floats(p) ? BATCH : instructions().max_batch;
  const int64_t size = std::clamp((count + parts - 1) / parts, BATCH, max_batch);
  task.batch_size = size;
  const int64_t max_batches = m.experts + count / size;
  task.batches = memory<ExpertBatch>(max_batches < count ? max_batches : count);
  ExpertBatch *batches = task.batches.get();
  if (!batches) return false;
  int64_t &batch_count = task.batch_count, &rows = task.rows;
  bool many = false;
  for (int64_t e = 0; e < m.experts; e++)
    for (int64_t i = begin[e]; i < begin[e + 1]; i += size) {
      const int64_t left = begin[e + 1] - i, some = left < size ? left : size;
      if (batch_count) batches[batch_count - 1].next_row = e * m.rows;
      batches[batch_count++] = {e, some, task.outputs.get() + i, (e + 1) * m.rows, 0};
      many |= some > 1;
    }
  static std::atomic<uint64_t> ids{1};  // 0 is nobody's
  const bool again = before && is_batched_as(task, *before) && batch_count;
  const uint64_t id = again ? before->batches.get()[0].id : ids.fetch_add(batch_count);
  for (int64_t i = 0; i < batch_count; i++) batches[i].id = id + i;
  rows = CHUNK_ROWS;
  if (many && !in_floats(p) && p.prepared_stride * std::min(size, count) > PANEL_BYTES) {
    const int64_t tiles = batch_count * m.rows / (CHUNK_ROWS * PANEL_CHUNKS_PER_THREAD * threads());
    rows *= std::clamp<int64_t>(tiles, 1, MAX_PANEL_TILES);
  }
  if (!many) {
    const int64_t row = m.columns * (m.bits ? m.bits : m.type == TOAST_F32 ? 32 : 16) / 8 + 1;
    const int64_t share_bytes = batch_count * m.rows * row / (CHUNKS_PER_THREAD * threads());
    rows = std::clamp(share_bytes, MIN_BYTES, MAX_BYTES) / row / MIN_ROWS * MIN_ROWS;
    if (rows < MIN_ROWS) rows = MIN_ROWS;
  }
  task.chunks = (m.rows + rows - 1) / rows;
  return true;
}

// Returns as toast_multiply.
int multiply(const toast_product *products, int32_t n) {
  Task tasks[MAX_PRODUCTS] = {};
  int64_t ends[MAX_PRODUCTS], all = 0;
  double macs = 0;
  for (int32_t i = 0; i < n; i++)
    macs += double(products[i].count) * products[i].matrix->rows * products[i].matrix->columns;
  const Helpers help = helpers(macs, SERIAL_MACS);
  for (int32_t i = 0; i < n; i++) {
    const toast_product &request = products[i];
    Task &task = tasks[i];
    task.request = &request;
    task.p = {request.matrix, request.x,        request.vector, request.activation_bits,
              request.out,    request.out_type, nullptr,      0};
    const Task *before = i ? &tasks[i - 1] : nullptr;
    if (!prepare(task, before, help) || !split_into_chunks(task, before)) return 2;
    ends[i] = all += task.batch_count * task.chunks;
  }
  const Instructions &code = instructions();
  const bool done = share_checked(help, all, [&](int64_t i) {
    int32_t which = 0;
    while (i >= ends[which]) which++;
    const Task &task = tasks[which];
    if (which) i -= ends[which - 1];
    const int64_t first = i % task.chunks * task.rows, rows = task.p.matrix->rows;
    const int64_t end = first + task.rows < rows ? first + task.rows : rows;
    return code.multiply(task.p, task.batches[i / task.chunks], first, end);
  });
  return done ? 0 : 2;
}

}  // namespace

// That of an AMD processor, else 0.
static unsigned amd_family() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (__get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && __get_cpuid(1, &a, &b, &c, &d))
    return (a >> 8 & 15) + (a >> 20 & 255);
#endif
  return 0;
}
const bool is_zen4 = amd_family() == 0x19, is_zen5 = amd_family() == 0x1a;

const Instructions &instructions() {
  const Instructions *now = chosen.load(std::memory_order_relaxed);
  if (now) return *now;
  auto one = ALL;
  while (!(*one)->is_available()) one++;
  chosen.store(*one, std::memory_order_relaxed);
  return **one;
}

void *scratch(int kind, int64_t bytes) {
  static thread_local struct Buffers {
    void *memory[KINDS] = {};
    int64_t bytes[KINDS] = {};
    ~Buffers() {
      for (void *one : memory) free(one);
    }
  } buffers;
  if (!buffers.memory[kind] || buffers.bytes[kind] < bytes) {  // also for 0 bytes
    free(buffers.memory[kind]);
    buffers.memory[kind] = aligned_alloc(64, (bytes + 127) / 64 * 64);
    buffers.bytes[kind] = buffers.memory[kind] ? bytes : 0;
  }
  return buffers.memory[kind];
}

void *scratch_of(const ExpertBatch &batch, int64_t bytes, bool *known) {
  static thread_local uint64_t last = 0;
  *known = last == batch.id;
  void *memory = scratch(VECTORS, bytes);
  last = memory ? batch.id : 0;
  return memory;
}

}  // namespace toast

extern "C" {

int toast_multiply(const toast_matrix *matrix, const toast_vectors *x, int64_t count,
                   const uint32_t *vector, const uint32_t *expert, int32_t activation_bits,
                   void *out, int32_t out_type) {
  const toast_product one = {matrix, x, count, vector, expert, activation_bits, out, out_type};
  return toast_multiply_all(&one, 1);
}

int toast_multiply_all(const toast_product *products, int32_t n) {
  if (n < 0 || n > toast::MAX_PRODUCTS) return 1;
  for (int32_t i = 0; i < n; i++) {
    const toast_product &p = products[i];
    if (!toast::is_supported(*p.matrix) || p.x->type < TOAST_F32 || p.x->type > TOAST_BF16 ||
        p.out_type < TOAST_F32 || p.out_type > TOAST_BF16 || p.count >= UINT32_MAX)
      return 1;
  }
  return toast::multiply(products, n);
}

const char *toast_instructions(void) { return toast::instructions().name; }

int toast_choose_instructions(const char *name) {
  for (auto one : toast::ALL) {
    if (!strcmp(one->name, name) && one->is_available()) {
      toast::chosen.store(one);
      return 0;
    }
  }
  return 1;
}

void toast_set_threads(int32_t count) { toast::set_threads(count); }

int32_t toast_threads(void) { return toast::threads(); }

}  // extern "C"
