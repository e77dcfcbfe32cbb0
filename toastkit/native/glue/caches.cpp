// Keys and values of new positions, into a cache, as an MLX primitive.
#include "caches.h"

#include <sched.h>
#include <string.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

namespace toast {
namespace {

// Position by position, (positions, batch, heads, size), as a session's file has them; a cache made
// here lies head by head.
bool is_by_position(const mx::array &cache) {
  const int64_t size = cache.shape(3), heads = cache.shape(1);
  return !cache.flags().row_contiguous && cache.strides(3) == 1 && cache.strides(1) == size &&
         cache.strides(0) == heads * size && cache.strides(2) == cache.shape(0) * heads * size;
}

// How many are in line to write to which memory. Who was the last leaves a 0, since MLX holds the
// memory for a moment longer. Never destroyed: MLX's threads may outlive main.
struct Line {
  std::mutex mutex;
  std::condition_variable moved;
  std::unordered_map<const void *, int> writers;

  bool is_empty(const void *memory) const {
    const auto some = writers.find(memory);
    return some == writers.end() || !some->second;
  }
};
Line &line = *new Line;

constexpr int PATIENCE = 1000;  // looks at memory that MLX is about to let go of
constexpr size_t MOST = 1 << 12;  // memories that are remembered when nobody is in line any more
constexpr auto LONGEST = std::chrono::seconds(10);  // for who may have failed before he was in line

// Whether a cache's memory may be written to: see lie_as_before.
bool is_free(const mx::array &cache) {
  if (!cache.size() || !is_held_once(cache)) return false;
  if (!cache.data_shared_ptr()->is_owned() && !is_in_region(cache)) return false;
  if (is_sole(cache)) return true;
  std::unique_lock<std::mutex> lock(line.mutex);
  const void *memory = cache.data<char>();
  if (!line.writers.count(memory)) return false;
  line.moved.wait_for(lock, LONGEST, [&] { return line.is_empty(memory); });
  line.writers.erase(memory);
  for (int looks = 0; looks < PATIENCE && !is_sole(cache); looks++) sched_yield();
  return is_sole(cache);
}

// What a cache holds up to a position, where it lies.
void lay_out_part(const mx::array &cache, mx::array &part) {
  const int64_t heads = int64_t(cache.shape(0)) * cache.shape(1), size = cache.shape(3);
  const int64_t positions = cache.shape(2), count = part.shape(2);
  if (is_by_position(cache)) {
    part.copy_shared_buffer(cache, cache.strides(), {true, false, false}, part.size());
    return;
  }
  const bool rows = heads == 1 || count == positions;
  part.copy_shared_buffer(cache, {cache.shape(1) * positions * size, positions * size, size, 1},
                          {rows, rows, false}, ((heads - 1) * positions + count) * size);
}

// inputs: a cache of keys, one of values, new keys, new values. outputs: both caches, and both up
// to the last position.
void append(const Arrays &arrays, int64_t first) {
  for (int i = 0; i < 2; i++) {
    const mx::array &x = arrays[2 + i];
    mx::array cache = arrays[4 + i];
    const Written written(arrays[4 + i]);
    std::unique_ptr<InOrder> copy;
    toast_heads heads = {x.data<char>(), x.shape(0), x.shape(1), x.shape(2), x.shape(3),
                         {x.strides(0), x.strides(1), x.strides(2)}, type_of(x)};
    if (x.strides(3) != 1) {
      copy = std::make_unique<InOrder>(x);
      const int64_t row = heads.size, head = heads.length * row;
      heads.data = copy->data();
      heads.strides[0] = heads.heads * head, heads.strides[1] = head, heads.strides[2] = row;
    }
    write_heads(arrays[i], cache, heads, first);
  }
}

Arrays appended(const Arrays &inputs, int first) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (int i = 0; i < 2; i++) {
    const mx::array &cache = inputs[i], &x = inputs[2 + i];
    check_cache(cache, x.shape(), first);
    check(x.shape(2) == inputs[2].shape(2), "not as many values as keys");
    type_of(x);
    shapes.push_back(cache.shape());
    dtypes.push_back(cache.dtype());
  }
  for (int i = 0; i < 2; i++) {
    auto shape = shapes[i];
    shape[2] = first + inputs[2].shape(2);
    shapes.push_back(std::move(shape));
    dtypes.push_back(dtypes[i]);
  }
  return made("ToastAppend", std::move(shapes), dtypes, inputs,
              [first](const Arrays &arrays) { append(arrays, first); },
              [](const Arrays &inputs, Arrays &outputs) {
    for (int i = 0; i < 2; i++) {
      lie_as_before(inputs[i], outputs[i]);
      lay_out_part(outputs[i], outputs[2 + i]);
    }
  });
}

}  // namespace

void check_cache(const mx::array &cache, const mx::Shape &heads, int first) {
  check(cache.ndim() == 4 && heads.size() == 4 && cache.shape(0) == heads[0] &&
            cache.shape(1) == heads[1] && row_size(cache) == heads[3],
        "a cache of another shape");
  check(first >= 0 && heads[2] <= cache.shape(2) - first, "a cache that is full");
  kept_type(cache);
}

void lie_as_before(const mx::array &before, mx::array &cache) {
  const bool dense = before.flags().row_contiguous || is_by_position(before);
  if (dense && is_free(before)) {
    cache.copy_shared_buffer(before);
  } else if (!is_by_position(before)) {
    cache.set_data(mx::allocator::malloc(cache.nbytes()));
  } else {
    cache.set_data(mx::allocator::malloc(cache.nbytes()), cache.size(), before.strides(),
                   {true, false, false});
  }
  line_up(cache);
}

void line_up(const mx::array &cache) {
  if (!cache.size()) return;
  const std::lock_guard<std::mutex> lock(line.mutex);
  if (line.writers.size() > MOST)
    std::erase_if(line.writers, [](const auto &one) { return !one.second; });
  line.writers[cache.data<char>()]++;
}

Written::~Written() {
  if (!cache_.size()) return;
  const std::lock_guard<std::mutex> lock(line.mutex);
  const auto own = line.writers.find(cache_.data<char>());
  if (own != line.writers.end() && own->second) own->second--;
  line.moved.notify_all();
}

void write_heads(const mx::array &before, mx::array &cache, const toast_heads &heads,
                 int64_t first) {
  const bool holds = before.data_size() > 1 || before.size() == 1;
  if (holds && before.data<char>() != cache.data<char>()) {
    const bool same = before.strides() == cache.strides();
    memcpy(cache.data<char>(), same ? before.data<char>() : InOrder(before).data(),
           cache.nbytes());
  }
  const int64_t strides[3] = {cache.strides(0), cache.strides(1), cache.strides(2)};
  need(toast_append(&heads, cache.shape(2), first, cache.data<char>(), strides,
                    kept_type(cache)));
}

}  // namespace toast

extern "C" {

// Makes `made`, four arrays that nobody else has, both caches with the new positions from `first`
// on, and what they hold up to the last of these. Lazy. given: a cache of keys, one of values, new
// keys, new values. Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_append_array(void **made, void **given, int first) {
  using toast::array_of;
  return toast::wrong([&] {
    auto arrays = toast::appended({array_of(given[0]), array_of(given[1]), array_of(given[2]),
                                   array_of(given[3])}, first);
    for (int i = 0; i < 4; i++) array_of(made[i]) = arrays[i];
  });
}

}  // extern "C"
