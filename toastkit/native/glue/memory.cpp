// Memory for weights: MLX's own, on pages as large as the system has them. And what becomes of a
// process that reads mapped pages which their file has no longer.
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "arrays.h"

namespace toast {
namespace {

constexpr int64_t LEAST = 128 << 10;  // bytes of an array that malloc maps by itself
constexpr int64_t PAGE = 4096;        // of a file
constexpr int64_t MOVED = 1 << 20;    // bytes of an array from which it moves onto large pages
constexpr int COLLAPSE = 25;          // of madvise, since Linux 6.1

// Asks for large pages, before anything is written there. All pages of the array, not only the
// large ones that lie inside: maps that touch each other become one where both are asked for, and
// a large page may then have the end of one array and the beginning of the next.
// now: what is written already moves onto them. Where the system will not, nothing is lost.
void want_large_pages(const void *data, int64_t bytes, bool now) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = start & ~(page - 1);
  madvise(reinterpret_cast<void *>(first), start + bytes - first, MADV_HUGEPAGE);
  if (now) madvise(reinterpret_cast<void *>(first), start + bytes - first, COLLAPSE);
#else
  (void)data, (void)bytes, (void)now;
#endif
}

char last_line[256];
int last_code = 0;

// Nothing but system calls: the process was stopped anywhere.
void end_with_line(int signal, siginfo_t *about, void *) {
  if (about->si_code == BUS_ADRERR) {
    const ssize_t written = write(2, last_line, strlen(last_line));
    _exit(written < 0 ? 1 : last_code);
  }
  ::signal(signal, SIG_DFL);  // and it is raised again
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, uint8 (rows, columns) in memory of its own, of which
// nobody has written anything; or in that of `old`, NULL or an array of as many bytes made here,
// whose bytes are then of no use any more. at: where in a page of PAGE bytes it is to begin.
// Returns what is wrong; NULL where nothing is.
TOAST_API const char *toast_memory_array(void *out, int64_t rows, int64_t columns, int64_t at,
                                         void *old) {
  return toast::wrong([&] {
    const int64_t bytes = rows * columns, whole = bytes + toast::PAGE;
    const mx::Shape shape = {int(rows), int(columns)};
    mx::array memory = old ? toast::array_of(old)
                           : mx::array(mx::allocator::malloc(whole), shape, mx::uint8);
    toast::check(memory.dtype() == mx::uint8 && int64_t(memory.buffer_size()) >= whole,
                 "memory that is too small");
    char *first = static_cast<char *>(memory.buffer().raw_ptr());
    if (!old && bytes >= toast::LEAST) toast::want_large_pages(first, whole, false);
    const int64_t lead = (at - reinterpret_cast<intptr_t>(first)) & (toast::PAGE - 1);
    mx::array placed(shape, mx::uint8, nullptr, {});
    placed.copy_shared_buffer(memory, memory.strides(), memory.flags(), bytes,
                              first + lead - memory.data<char>());
    placed.set_status(mx::array::Status::available);
    toast::array_of(out) = placed;
  });
}

// Has the numbers of an evaluated array lie on large pages, where it is worth while and the system
// has them.
TOAST_API void toast_settle_array(void *x) {
  const mx::array &array = toast::array_of(x);
  const int64_t bytes = array.data_size() * array.itemsize();
  if (array.is_available() && bytes >= toast::MOVED)
    toast::want_large_pages(array.data<char>(), bytes, true);
}

// Has this process, where it reads a page that a mapped file has no longer or that cannot be read,
// end with a line on stderr and an exit code, unless somebody else takes that signal.
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
