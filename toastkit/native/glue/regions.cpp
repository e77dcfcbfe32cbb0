// Regions: address ranges into which files are mapped, and MLX arrays over them.
//
// A region lives as long as its handle or any of its arrays. MLX reuses an input's buffer for a
// result only if it owns it, which it does not here. Pages that are written to all the same are
// private copies (MAP_PRIVATE), and never reach a file.
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <set>

#include "arrays.h"

namespace toast {
namespace {

const int64_t SYSTEM_PAGE = sysconf(_SC_PAGESIZE);

constexpr int64_t LARGE = 4 << 20;  // bytes of an array that gets memory to grow in
constexpr int64_t RESERVE = 256 << 20;  // bytes of addresses, or eight times its size

// Half of the 65,530 mappings that Linux allows a process: allocators need some as well.
constexpr int MAX_MAPS = 1 << 15;

int64_t pages(int64_t bytes) { return (bytes + SYSTEM_PAGE - 1) / SYSTEM_PAGE * SYSTEM_PAGE; }

// Whether addresses that nothing is written to count against a limit, of this process or, where
// Linux never overcommits, of the machine: those to grow in would be missing elsewhere.
bool addresses_count() {
  for (const auto kind : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit most;
    if (!getrlimit(kind, &most) && most.rlim_cur != RLIM_INFINITY) return true;
  }
  const int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char mode = 0;
  const bool never = read(fd, &mode, 1) == 1 && mode == '2';
  close(fd);
  return never;
}

// See toast_room_to_grow.
int64_t room_to_grow(int64_t bytes) {
  return addresses_count() ? bytes : std::max(RESERVE, 8 * bytes);
}

class Region {
 public:
  // Reserves address space and, before it, a page where MLX's allocator looks for a buffer's size.
  // Throws an errno.
  explicit Region(int64_t bytes) : bytes_(pages(bytes)) {
    void *there = mmap(nullptr, SYSTEM_PAGE + bytes_, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (there == MAP_FAILED) throw errno;
    start_ = static_cast<char *>(there) + SYSTEM_PAGE;
    if (mprotect(there, SYSTEM_PAGE, PROT_READ | PROT_WRITE)) {
      const int why = errno;
      munmap(there, SYSTEM_PAGE + bytes_);
      throw why;
    }
    reinterpret_cast<size_t *>(start_)[-1] = bytes_;
    const std::lock_guard<std::mutex> one(all_lock);
    all.insert(start_);
  }
  Region(const Region &) = delete;
  Region &operator=(const Region &) = delete;
  ~Region() {
    {
      const std::lock_guard<std::mutex> one(all_lock);
      all.erase(start_);
      all_growing.erase(all_growing.lower_bound(start_), all_growing.lower_bound(start_ + bytes_));
    }
    munmap(start_ - SYSTEM_PAGE, SYSTEM_PAGE + bytes_);
    if (kept_ >= 0) close(kept_);
    maps -= maps_;
  }

  char *start() const { return start_; }
  int64_t bytes() const { return bytes_; }
  bool has(int64_t at, int64_t count) const {
    return at >= 0 && count >= 0 && count <= bytes_ && at <= bytes_ - count;
  }

  // Returns an errno or 0.
  int map(int64_t at, int64_t count, int fd, int64_t offset) {
    if (!has(at, count) || at % SYSTEM_PAGE || offset < 0 || offset % SYSTEM_PAGE) return EINVAL;
    if (!count) return 0;
    if (maps + 1 > MAX_MAPS) return ENOMEM;
    maps++, maps_++;
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
    void *there = mmap(start_ + at, count, PROT_READ | PROT_WRITE, flags, fd, offset);
    return there == MAP_FAILED ? errno : 0;
  }

  // The region closes the descriptor when it is destroyed.
  void keep(int fd) { kept_ = fd; }

  static bool has_array(const mx::array &a) {
    const std::lock_guard<std::mutex> one(all_lock);
    return all.count(static_cast<char *>(a.buffer().raw_ptr()));
  }

  // Writable, for one array that begins with it and may grow. Throws an errno.
  static std::shared_ptr<Region> growing(int64_t bytes) {
    auto made = std::make_shared<Region>(bytes);
    if (const int why = made->map(0, made->bytes(), -1, 0)) throw why;
    maps++, made->maps_++;  // the page before it: those of other regions count by their pieces
#ifdef MADV_HUGEPAGE
    made->advise(0, made->bytes(), MADV_HUGEPAGE);  // it may know none
#endif
    made->grow(0, made->bytes());
    return made;
  }

  // An array that begins with byte `at`, in writable memory, may grow to so many bytes. Returns an
  // errno or 0.
  int grow(int64_t at, int64_t bytes) {
    if (!has(at, bytes)) return EINVAL;
    const std::lock_guard<std::mutex> one(all_lock);
    all_growing[start_ + at] = bytes;
    return 0;
  }

  // Bytes that an array may grow to; 0 for one of which nothing is known.
  static int64_t room_of(const mx::array &a) {
    const std::lock_guard<std::mutex> one(all_lock);
    const auto known = all_growing.find(const_cast<char *>(a.data<char>()));
    return known == all_growing.end() ? 0 : known->second;
  }

  int advise(int64_t at, int64_t count, int how) {
    if (!has(at, count)) return EINVAL;
    const int64_t first = at / SYSTEM_PAGE * SYSTEM_PAGE;
    return count && madvise(start_ + first, at + count - first, how) ? errno : 0;
  }

 private:
  // Never destroyed: MLX's threads may outlive main.
  static inline std::mutex &all_lock = *new std::mutex;
  static inline std::set<char *> &all = *new std::set<char *>;
  static inline std::map<char *, int64_t> &all_growing = *new std::map<char *, int64_t>;
  static inline std::atomic<int> maps{0};

  char *start_;
  int64_t bytes_;
  int kept_ = -1, maps_ = 0;
};

using Held = std::shared_ptr<Region>;

// Gives an array memory that `hold` keeps alive. offset: in bytes.
void set_memory(mx::array &array, const Held &hold, int64_t offset, const mx::Strides &strides,
                mx::array::Flags flags) {
  using mx::allocator::Buffer;
  // An MLX buffer points a little before its first byte.
  const auto lead = static_cast<char *>(Buffer(hold->start()).raw_ptr()) - hold->start();
  array.set_data({Buffer(hold->start() - lead), [hold](Buffer) {}}, array.size(), strides, flags,
                 offset);
}

// An evaluated array over a region, row contiguous.
mx::array array_over(const Held &hold, int64_t offset, const mx::Shape &shape, mx::Dtype dtype) {
  mx::array made(shape, dtype, nullptr, {});
  set_memory(made, hold, offset, row_strides(shape),
             {true, true, made.size() <= 1 || shape.size() <= 1});
  made.set_status(mx::array::Status::available);
  return made;
}

}  // namespace

bool is_in_region(const mx::array &a) { return a.size() && Region::has_array(a); }

bool allocate_growing(mx::array &output, const mx::Strides &strides, mx::array::Flags flags) {
  const int64_t bytes = int64_t(output.nbytes());
  if (bytes < LARGE) return false;
  const int64_t room = room_to_grow(bytes);
  if (room == bytes) return false;
  try {
    set_memory(output, Region::growing(room), 0, strides, flags);
    return true;
  } catch (int) {
    return false;
  }
}

int64_t bytes_to_grow_in(const mx::array &a) { return a.size() ? Region::room_of(a) : 0; }

void release_behind(const mx::array &a, int64_t bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(a.data<char>()), rest = SYSTEM_PAGE - 1;
  const uintptr_t first = (start + a.nbytes() + rest) & ~rest;
  if (first < start + bytes)
    madvise(reinterpret_cast<void *>(first), start + bytes - first, MADV_DONTNEED);
}

}  // namespace toast

extern "C" {

// Sets `out` to the handle of a region of `bytes` bytes, rounded up to whole pages, that must not
// be read before something is mapped into it. Returns an errno or 0, as do the next functions.
TOAST_API int toast_region_open(int64_t bytes, void **out) {
  if (bytes <= 0 || bytes > INT64_MAX / 2) return EINVAL;
  try {
    *out = new toast::Held(std::make_shared<toast::Region>(bytes));
    return 0;
  } catch (int why) {
    return why;
  } catch (const std::bad_alloc &) {
    return ENOMEM;
  }
}

// Closes the handle; arrays keep the region alive.
TOAST_API void toast_region_close(void *region) { delete static_cast<toast::Held *>(region); }

// Maps a file from `offset` on to byte `at` of the region, copy on write; zeros for fd -1.
TOAST_API int toast_region_map(void *region, int64_t at, int64_t bytes, int fd, int64_t offset) {
  return (*static_cast<toast::Held *>(region))->map(at, bytes, fd, offset);
}

// Lets an array that begins with byte `at` of the region, in memory, grow to so many bytes.
TOAST_API int toast_region_grow(void *region, int64_t at, int64_t bytes) {
  return (*static_cast<toast::Held *>(region))->grow(at, bytes);
}

// Bytes of addresses for an array of so many bytes that grows: only its own if addresses that
// nothing is written to count, as they would be missing elsewhere.
TOAST_API int64_t toast_room_to_grow(int64_t bytes) { return toast::room_to_grow(bytes); }

// Gives the region ownership of a descriptor, one at most.
TOAST_API void toast_region_keep(void *region, int fd) {
  (*static_cast<toast::Held *>(region))->keep(fd);
}

// madvise on bytes of the region.
TOAST_API int toast_region_advise(void *region, int64_t at, int64_t bytes, int how) {
  return (*static_cast<toast::Held *>(region))->advise(at, bytes, how);
}

// Sets `out`, an unshared array, to a row-contiguous array over the region from byte `at` on, with
// the dtype of `like`. Returns an error message or NULL.
TOAST_API const char *toast_region_array(void *out, void *region, int64_t at, void *like,
                                         const int32_t *shape, int axes) {
  using namespace toast;
  return guarded([&] {
    const Held &held = *static_cast<Held *>(region);
    const mx::Dtype dtype = array_of(like).dtype();
    int64_t bytes = mx::size_of(dtype);
    check(at % bytes == 0, "numbers that begin within one");
    for (int i = 0; i < axes; i++) {
      check(shape[i] >= 0 && !__builtin_mul_overflow(bytes, int64_t(shape[i]), &bytes),
            "a shape that is none");
    }
    check(held->has(at, bytes), "an array beyond its region");
    array_of(out) = array_over(held, at, mx::Shape(shape, shape + axes), dtype);
  });
}

}  // extern "C"
