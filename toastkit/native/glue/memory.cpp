// Memory for weights: MLX buffers on huge pages. And a clean end for a process that reads mapped
// pages which their file no longer has (SIGBUS).
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arrays.h"

namespace toast {
namespace {

constexpr int64_t MIN_MAPPED_BYTES = 128 << 10;  // from which malloc uses a mapping of its own
constexpr int64_t PAGE = 4096;        // alignment of arrays in files
constexpr int64_t MOVED = 1 << 20;    // bytes from which an existing array moves onto huge pages
constexpr int COLLAPSE = 25;          // MADV_COLLAPSE, since Linux 6.1

// Asks for huge pages, best before the memory is first written to; failure does no harm. The range
// covers every page of the array, not only the huge pages inside it: adjacent mappings with the
// same advice merge, and a huge page may then span the end of one array and the beginning of the
// next. now: also moves memory that has been written to (MADV_COLLAPSE).
void want_large_pages(const void *data, int64_t bytes, bool now) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = start & ~(page - 1);
  madvise(reinterpret_cast<void *>(first), start + bytes - first, MADV_HUGEPAGE);
  if (now) madvise(reinterpret_cast<void *>(first), start + bytes - first, COLLAPSE);
}

// A new buffer of MLX. MLX 0.32 counts a buffer that it could not get among its active memory, for
// good, and above its limit each operation waits for the one before: so the system is asked first.
auto buffer_of(int64_t bytes) {
  void *volatile memory = malloc(bytes);  // volatile: the pair is not removed by the compiler
  check(memory, "memory that the system does not have");
  free(memory);
  return mx::allocator::malloc(bytes);
}

char last_line[256];
int last_code = 0;

// Async-signal-safe: system calls only.
void end_with_line(int signal, siginfo_t *about, void *) {
  if (about->si_code == BUS_ADRERR) {
    const ssize_t written = write(2, last_line, strlen(last_line));
    _exit(written < 0 ? 1 : last_code);
  }
  ::signal(signal, SIG_DFL);  // returning raises it again
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to an uninitialised uint8 array (rows, columns) that begins `at`
// bytes into a page of PAGE bytes. It reuses the memory of `old`, an array of the same size made
// here whose contents are lost, or allocates if `old` is NULL. Returns an error message or NULL.
TOAST_API const char *toast_memory_array(void *out, int64_t rows, int64_t columns, int64_t at,
                                         void *old) {
  return toast::guarded([&] {
    const int64_t bytes = rows * columns, whole = bytes + toast::PAGE;
    const mx::Shape shape = {int(rows), int(columns)};
    mx::array memory = old ? toast::array_of(old)
                           : mx::array(toast::buffer_of(whole), shape, mx::uint8);
    toast::check(memory.dtype() == mx::uint8 && int64_t(memory.buffer_size()) >= whole,
                 "memory that is too small");
    char *first = static_cast<char *>(memory.buffer().raw_ptr());
    if (!old && bytes >= toast::MIN_MAPPED_BYTES) toast::want_large_pages(first, whole, false);
    const int64_t lead = (at - reinterpret_cast<intptr_t>(first)) & (toast::PAGE - 1);
    mx::array placed(shape, mx::uint8, nullptr, {});
    placed.copy_shared_buffer(memory, memory.strides(), memory.flags(), bytes,
                              first + lead - memory.data<char>());
    placed.set_status(mx::array::Status::available);
    toast::array_of(out) = placed;
  });
}

// Moves an evaluated array onto huge pages if it is large enough and the system can.
TOAST_API void toast_settle_array(void *x) {
  const mx::array &array = toast::array_of(x);
  const int64_t bytes = array.data_size() * array.itemsize();
  if (array.is_available() && bytes >= toast::MOVED)
    toast::want_large_pages(array.data<char>(), bytes, true);
}

// Makes a read of a mapped page that its file no longer has, or that cannot be read, end this
// process with a line on stderr and an exit code, unless SIGBUS has another handler.
TOAST_API void toast_end_with_line(const char *line, int code) {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) || now.sa_handler != SIG_DFL) return;
  strncpy(toast::last_line, line, sizeof toast::last_line - 1);
  toast::last_code = code;
  memset(&now, 0, sizeof now);
  now.sa_sigaction = toast::end_with_line;
  now.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &now, nullptr);
}

}  // extern "C"
