// Appending keys and values to KV caches in place, as an MLX primitive.
#include "caches.h"

#include <sched.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

namespace toast {
namespace {

// One head's rows: all orders of memory are one.
bool is_single(const mx::array &cache) { return cache.shape(0) * cache.shape(1) == 1; }

// Of memory order (positions, batch, heads, size), that of session files and of large caches: they
// grow at the end. Small ones allocated here are (batch, heads, positions, size).
mx::Strides strides_by_position(const mx::array &cache) {
  const int64_t size = cache.shape(3), heads = cache.shape(1), all = cache.shape(2) * size;
  if (is_single(cache)) return {all, all, size, 1};
  return {heads * size, size, cache.shape(0) * heads * size, 1};
}

mx::array::Flags flags_by_position(const mx::array &cache) {
  return {true, is_single(cache), false};
}

bool is_by_position(const mx::array &cache) {
  const auto strides = strides_by_position(cache);
  if (cache.flags().row_contiguous != is_single(cache)) return false;
  for (size_t axis = 0; axis < strides.size(); axis++)  // MLX sets any stride where there is one
    if (cache.shape(axis) != 1 && cache.strides(axis) != strides[axis]) return false;
  return true;
}

// Registered writers by buffer. The last one leaves a count of 0, as MLX still holds the buffer for
// a moment. Never destroyed: MLX's threads may outlive main.
struct Writers {
  std::mutex mutex;
  std::condition_variable done;
  std::unordered_map<const void *, int> count;

  bool none(const void *memory) const {
    const auto some = count.find(memory);
    return some == count.end() || !some->second;
  }
};
Writers &pending = *new Writers;

// The buffers of one writer, which are registered until it has run or was given up.
class Registered {
 public:
  explicit Registered(size_t most) { buffers_.reserve(most); }

  // The caller holds the lock.
  void add(const void *memory) {
    pending.count[memory]++;
    buffers_.push_back(memory);
  }

  ~Registered() {
    const std::lock_guard<std::mutex> lock(pending.mutex);
    for (const void *memory : buffers_) {
      const auto own = pending.count.find(memory);
      if (own != pending.count.end() && own->second) own->second--;
    }
    pending.done.notify_all();
  }

 private:
  std::vector<const void *> buffers_;
};

constexpr int PATIENCE = 1000;    // polls of a buffer that MLX is about to release
constexpr size_t MAX_REMEMBERED = 1 << 12;  // buffers without writers that are remembered
constexpr auto LONGEST = std::chrono::seconds(10);  // waited for a writer, which may have failed

// True if a cache's buffer may be written to, once its registered writers are done.
bool may_be_overwritten(const mx::array &cache) {
  if (!cache.size() || !is_sole_reference(cache)) return false;
  if (!cache.data_shared_ptr()->is_owned() && !is_in_region(cache)) return false;
  if (is_sole_owner(cache)) return true;
  std::unique_lock<std::mutex> lock(pending.mutex);
  const void *memory = cache.data<char>();
  if (!pending.count.count(memory)) return false;
  pending.done.wait_for(lock, LONGEST, [&] { return pending.none(memory); });
  pending.count.erase(memory);
  for (int looks = 0; looks < PATIENCE && !is_sole_owner(cache); looks++) sched_yield();
  return is_sole_owner(cache);
}

// See allocate_caches.
void allocate_cache(const mx::array &before, mx::array &cache) {
  const bool grows = cache.shape(2) > before.shape(2), ordered = is_by_position(before);
  const bool dense = ordered || before.flags().row_contiguous;
  const bool fits = !grows || (ordered && bytes_to_grow_in(before) >= int64_t(cache.nbytes()));
  if (dense && fits && may_be_overwritten(before)) {
    if (grows)
      cache.copy_shared_buffer(before, strides_by_position(cache), flags_by_position(cache),
                               cache.size());
    else
      cache.copy_shared_buffer(before);
    return;
  }
  const auto by_position = strides_by_position(cache);
  const auto flags = flags_by_position(cache);
  if (allocate_growing(cache, by_position, flags)) return;
  if (ordered)
    cache.set_data(memory_for(cache), cache.size(), by_position, flags);
  else
    cache.set_data(memory_for(cache));
}

// Makes `part` a view of the first positions of a cache.
void view_prefix(const mx::array &cache, mx::array &part) {
  const int64_t heads = int64_t(cache.shape(0)) * cache.shape(1), size = cache.shape(3);
  const int64_t positions = cache.shape(2), count = part.shape(2);
  if (is_by_position(cache)) {
    part.copy_shared_buffer(cache, cache.strides(), flags_by_position(cache), part.size());
    return;
  }
  const bool rows = heads == 1 || count == positions;
  part.copy_shared_buffer(cache, {cache.shape(1) * positions * size, positions * size, size, 1},
                          {rows, rows, false}, ((heads - 1) * positions + count) * size);
}

// inputs: key cache, value cache, new keys, new values. outputs: both caches, and views of both up
// to the last position.
void append(const Arrays &arrays, int64_t first) {
  for (int i = 0; i < 2; i++) {
    const mx::array &x = arrays[2 + i];
    mx::array cache = arrays[4 + i];
    const Rows rows(x);
    write_heads(arrays[i], cache,
                {rows.data(), x.shape(0), x.shape(1), x.shape(2), x.shape(3),
                 {rows.stride(0), rows.stride(1), rows.stride(2)}, type_of(x)}, first);
  }
}

// The shape of a cache of so many positions, if it has not as many already, that new heads are
// written into from `first` on. Throws std::invalid_argument as check_cache.
mx::Shape grown_shape(const mx::array &cache, const mx::array &x, int first, int positions) {
  check(cache.ndim() == 4 && first <= cache.shape(2), "a cache of another shape");
  type_of(x);
  mx::Shape shape = cache.shape();
  shape[2] = std::max(shape[2], positions);
  check_cache(mx::array(shape, cache.dtype(), nullptr, {}), x.shape(), first);
  return shape;
}

Arrays appended(const Arrays &inputs, int first, int positions) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (int i = 0; i < 2; i++) {
    const mx::array &cache = inputs[i], &x = inputs[2 + i];
    shapes.push_back(grown_shape(cache, x, first, positions));
    check(x.shape(2) == inputs[2].shape(2), "not as many values as keys");
    dtypes.push_back(cache.dtype());
  }
  for (int i = 0; i < 2; i++) {
    auto shape = shapes[i];
    shape[2] = first + inputs[2].shape(2);
    shapes.push_back(std::move(shape));
    dtypes.push_back(dtypes[i]);
  }
  return lazy("ToastAppend", std::move(shapes), dtypes, inputs, [first](const Arrays &arrays) {
    append(arrays, first);
  }, [](const Arrays &inputs, Arrays &outputs) {
    allocate_caches(inputs.data(), outputs.data());
    for (int i = 0; i < 2; i++) view_prefix(outputs[i], outputs[2 + i]);
  });
}

// inputs: keys and values of each row in turn, then new keys and values of all rows. outputs: the
// updated caches.
void append_apart(const Arrays &arrays, const std::vector<int> &firsts) {
  const size_t n = firsts.size();
  const Rows added[2] = {Rows(arrays[2 * n]), Rows(arrays[2 * n + 1])};
  for (size_t i = 0; i < 2 * n; i++) {
    const mx::array &x = arrays[2 * n + i % 2];
    const Rows &rows = added[i % 2];
    mx::array cache = arrays[2 * n + 2 + i];
    write_heads(arrays[i], cache,
                {rows.data() + int64_t(i / 2) * rows.stride(0) * int64_t(x.itemsize()), 1,
                 x.shape(1), x.shape(2), x.shape(3),
                 {rows.stride(0), rows.stride(1), rows.stride(2)}, type_of(x)}, firsts[i / 2]);
  }
}

Arrays appended_apart(Arrays inputs, std::vector<int> firsts, const int *positions) {
  const size_t n = firsts.size();
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (size_t i = 0; i < 2 * n; i++) {
    const mx::array &x = inputs[2 * n + i % 2];
    check(x.ndim() == 4 && x.shape(0) == int(n) && x.shape(2) == inputs[2 * n].shape(2),
          "not as many rows or positions");
    const mx::array one({1, x.shape(1), x.shape(2), x.shape(3)}, x.dtype(), nullptr, {});
    shapes.push_back(grown_shape(inputs[i], one, firsts[i / 2], positions[i / 2]));
    dtypes.push_back(inputs[i].dtype());
  }
  return lazy("ToastAppendApart", std::move(shapes), dtypes, std::move(inputs),
              [firsts = std::move(firsts)](const Arrays &arrays) { append_apart(arrays, firsts); },
              [n](const Arrays &inputs, Arrays &outputs) {
    allocate_caches(inputs.data(), outputs.data(), n);
  });
}

// outputs: keys and values (n, heads, positions, size) of all rows, zeros before those with fewer
// positions.
void pad(const Arrays &arrays, const std::vector<int> &lengths) {
  const size_t n = lengths.size();
  for (size_t i = 0; i < 2 * n; i++) {
    mx::array out = arrays[2 * n + i % 2];
    const Rows rows(arrays[i]);
    const int64_t row = out.shape(3) * int64_t(out.itemsize()), positions = out.shape(2);
    const int64_t length = lengths[i / 2], zeros = (positions - length) * row;
    for (int64_t head = 0; head < out.shape(1); head++) {
      char *to = out.data<char>() + (int64_t(i / 2) * out.shape(1) + head) * positions * row;
      memset(to, 0, zeros);
      for (int64_t j = 0; j < length; j++)
        memcpy(to + zeros + j * row, rows.data() + (head * rows.stride(1) + j * rows.stride(2)) *
                                                       int64_t(out.itemsize()), row);
    }
  }
}

Arrays padded(Arrays inputs, std::vector<int> lengths) {
  const int n = int(lengths.size());
  std::vector<mx::Shape> shapes;
  for (int i = 0; i < 2 * n; i++) {
    const mx::array &x = inputs[i], &first = inputs[i % 2];
    check(x.ndim() == 4 && x.shape(0) == 1 && x.shape(1) == first.shape(1) &&
              x.shape(3) == first.shape(3) && x.dtype() == first.dtype(),
          "rows of another shape");
    check(lengths[i / 2] >= 0 && lengths[i / 2] <= x.shape(2), "fewer positions");
  }
  const int most = *std::max_element(lengths.begin(), lengths.end());
  for (int i = 0; i < 2; i++)
    shapes.push_back({n, inputs[i].shape(1), most, inputs[i].shape(3)});
  const std::vector<mx::Dtype> dtypes = {inputs[0].dtype(), inputs[1].dtype()};
  return lazy("ToastPadded", std::move(shapes), dtypes, std::move(inputs),
              [lengths = std::move(lengths)](const Arrays &arrays) { pad(arrays, lengths); });
}

// Copies all positions of a cache to one that has as many or more.
void copy_positions(const mx::array &before, mx::array &cache) {
  const bool same = before.shape() == cache.shape() && before.strides() == cache.strides();
  if (same || (is_by_position(before) && is_by_position(cache))) {
    memcpy(cache.data<char>(), before.data<char>(), before.nbytes());
    return;
  }
  const Rows rows(before);
  const int64_t item = int64_t(cache.itemsize()), size = cache.shape(3) * item;
  for (int64_t i = 0; i < cache.shape(0); i++)
    for (int64_t j = 0; j < before.shape(2); j++)
      for (int64_t head = 0; head < cache.shape(1); head++)
        memcpy(cache.data<char>() + item * (i * cache.strides(0) + head * cache.strides(1) +
                                            j * cache.strides(2)),
               rows.data() + item * (i * rows.stride(0) + head * rows.stride(1) +
                                     j * rows.stride(2)), size);
}

}  // namespace

void check_cache(const mx::array &cache, const mx::Shape &heads, int first) {
  check(cache.ndim() == 4 && heads.size() == 4 && cache.shape(0) == heads[0] &&
            cache.shape(1) == heads[1] && head_size(cache) == heads[3],
        "a cache of another shape");
  check(first >= 0 && heads[2] <= cache.shape(2) - first, "a cache that is full");
  cache_type(cache);
}

void allocate_caches(const mx::array *before, mx::array *caches, size_t n) {
  for (size_t i = 0; i < 2 * n; i++) allocate_cache(before[i], caches[i]);
  register_writer(caches, n);
}

void register_writer(const mx::array *caches, size_t n) {
  const auto buffers = std::make_shared<Registered>(2 * n);
  keep_until_run(buffers);
  const std::lock_guard<std::mutex> lock(pending.mutex);
  if (pending.count.size() > MAX_REMEMBERED)
    std::erase_if(pending.count, [](const auto &one) { return !one.second; });
  for (size_t i = 0; i < 2 * n; i++)
    if (caches[i].size()) buffers->add(caches[i].data<char>());
}

void allocate_reader(const Arrays &inputs, Arrays &outputs) {
  allocate_by_position(inputs, outputs);
  register_writer(&inputs[1], (inputs.size() - 1) / 2);  // sinks may follow
}

void write_heads(const mx::array &before, mx::array &cache, const toast_heads &heads,
                 int64_t first) {
  const bool holds = before.data_size() > 1 || before.size() == 1;
  if (holds && before.data<char>() != cache.data<char>()) copy_positions(before, cache);
  const int64_t strides[3] = {cache.strides(0), cache.strides(1), cache.strides(2)};
  need(toast_append(&heads, cache.shape(2), first, cache.data<char>(), strides, cache_type(cache)));
}

}  // namespace toast

extern "C" {

// Sets `made`, four unshared arrays, to both caches with the new positions written from `first` on,
// and views of them up to the last position. Lazy. given: key cache, value cache, new keys, new
// values. positions: of the caches from now on, if that is more than they have. Returns an error
// message or NULL.
TOAST_API const char *toast_append_array(void **made, void **given, int first, int positions) {
  return set_arrays(made, [&] { return toast::appended(arrays_of(given, 4), first, positions); });
}

// Sets `made`, 2 n unshared arrays, to the caches of n rows, keys and values in turn, with the new
// positions written in place from firsts[row] on. Lazy. given: these caches, (1, heads, M, size)
// each, then new keys and new values of all rows, (n, heads, N, size). positions: of each row's
// caches from now on, if that is more than they have.
TOAST_API const char *toast_append_apart_array(void **made, void **given, const int *firsts,
                                               const int *positions, int n) {
  return set_arrays(made, [&] {
    return toast::appended_apart(arrays_of(given, 2 * n + 2), {firsts, firsts + n}, positions);
  });
}

// Sets `made`, two unshared arrays, to keys and values of n rows, (n, heads, longest, size), zeros
// on the left of shorter ones. Lazy. given: the rows' caches, keys and values in turn.
TOAST_API const char *toast_padded_array(void **made, void **given, const int *lengths, int n) {
  return set_arrays(made, [&] {
    toast::check(n > 0, "no rows");
    return toast::padded(arrays_of(given, 2 * n), {lengths, lengths + n});
  });
}

}  // extern "C"
