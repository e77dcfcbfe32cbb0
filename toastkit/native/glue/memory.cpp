// Memory for weights: MLX's own, on pages as large as the system has them.
#include <stddef.h>
#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "arrays.h"

namespace toast {
namespace {

constexpr int64_t LEAST = 128 << 10;  // bytes of an array that malloc maps by itself

// Asks for large pages, before anything is written there. All pages of the array, not only the
// large ones that lie inside: maps that touch each other become one where both are asked for, and
// a large page may then have the end of one array and the beginning of the next.
void want_large_pages(void *data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = start & ~(page - 1);
  madvise(reinterpret_cast<void *>(first), start + bytes - first, MADV_HUGEPAGE);  // no: no harm
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, uint8 (rows, columns) in memory of its own, of which
// nobody has written anything. Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_memory_array(void *out, int64_t rows, int64_t columns) {
  return toast::wrong([&] {
    const int64_t bytes = rows * columns;
    auto data = mx::allocator::malloc(bytes);
    if (bytes >= toast::LEAST) toast::want_large_pages(data.buffer().raw_ptr(), bytes);
    toast::array_of(out) = mx::array(std::move(data), {int(rows), int(columns)}, mx::uint8);
  });
}

}  // extern "C"
