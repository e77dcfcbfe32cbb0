// A number that is not known yet, as an array: work that depends on it can be handed to MLX's
// stream ahead of time, and starts the moment the number is named.
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_set>

#include "arrays.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace toast {
namespace {

std::mutex &naming = *new std::mutex;  // never destroyed: MLX's threads may outlive main
std::condition_variable &named = *new std::condition_variable;
bool leaving = false;  // the process is ending: do not wait any more
pid_t waiting = 0;     // the thread that waits, if one does

struct Awaited {
  bool known = false;
  uint32_t number = 0;
};
using Shared = std::shared_ptr<Awaited>;

void leave() {
  std::lock_guard<std::mutex> held(naming);
  leaving = true;
  named.notify_all();
}

void wait_for(const Shared &one, const Arrays &arrays) {
  static thread_local const pid_t own = pid_t(syscall(SYS_gettid));
  std::unique_lock<std::mutex> held(naming);
  waiting = own;
  named.wait(held, [&] { return one->known || leaving; });
  waiting = 0;
  *const_cast<mx::array &>(arrays[0]).data<uint32_t>() = one->number;
}

// While it lives a thread, 0 for none, is woken on another processor than this thread's, which goes
// on working: Linux leaves it behind this one where both were and most processors are busy.
class Elsewhere {
 public:
  explicit Elsewhere(pid_t thread) : thread_(thread) {
    if (thread && !sched_getaffinity(thread, sizeof all_, &all_)) {
      cpu_set_t others = all_;
      CPU_CLR(sched_getcpu(), &others);
      if (CPU_COUNT(&others) && !sched_setaffinity(thread, sizeof others, &others)) return;
    }
    thread_ = 0;
  }
  ~Elsewhere() {
    if (thread_) sched_setaffinity(thread_, sizeof all_, &all_);
  }
  Elsewhere(const Elsewhere &) = delete;

 private:
  pid_t thread_;
  cpu_set_t all_;
};

// Visits an output of each operation that must still be scheduled for arrays to be evaluated;
// returns their number.
template <class Visit>
int count_operations(Arrays open, const Visit &visit) {
  std::unordered_set<std::uintptr_t> seen;
  while (!open.empty()) {
    const mx::array one = std::move(open.back());
    open.pop_back();
    if (!one.has_primitive() || one.status() != mx::array::Status::unscheduled) continue;
    if (!seen.insert(one.primitive_id()).second) continue;
    visit(one);
    open.insert(open.end(), one.inputs().begin(), one.inputs().end());
  }
  return int(seen.size());
}

}  // namespace
}  // namespace toast

extern "C" {

// Sets `out`, an unshared array, to a lazy uint32 scalar for which MLX's stream waits when it gets
// there. *place: the handle for toast_name_awaited. Returns an error message or NULL.
TOAST_API const char *toast_awaited_array(void *out, void **place) {
  return toast::guarded([&] {
    static const int once = atexit(toast::leave);  // runs before MLX joins its threads
    toast::check(once == 0, "no room to be told of the end");
    auto one = std::make_shared<toast::Awaited>();
    toast::array_of(out) =
        toast::lazy("ToastAwaited", {}, mx::uint32, {},
                    [one](const toast::Arrays &arrays) { toast::wait_for(one, arrays); });
    *place = new toast::Shared(one);
  });
}

// Names the number and frees the handle.
TOAST_API void toast_name_awaited(void *place, uint32_t number) {
  std::unique_ptr<toast::Shared> one(static_cast<toast::Shared *>(place));
  std::unique_lock<std::mutex> held(toast::naming);
  (*one)->known = true, (*one)->number = number;
  const toast::Elsewhere elsewhere(toast::waiting);
  held.unlock();  // or it would be woken twice
  toast::named.notify_all();
}

// Ends all waiting because the process is ending.
TOAST_API void toast_leave(void) { toast::leave(); }

// The number of operations that must still be scheduled for an array to be evaluated.
TOAST_API int toast_operations(void *x) {
  return toast::count_operations({toast::array_of(x)}, [](const mx::array &) {});
}

// Their names for several arrays, one a line, as MLX prints them. Valid until the thread's next
// call.
TOAST_API const char *toast_operation_names(void **arrays, int n) {
  static thread_local std::string names;
  names.clear();
  toast::count_operations(toast::arrays_of(arrays, n), [](const mx::array &one) {
    names += one.primitive().name();
    names += '\n';
  });
  return names.c_str();
}

// Adds `more` to MLX's count of unfinished tasks. Its eval blocks while there are many, which would
// be a deadlock if they wait for a number that the caller has yet to name.
TOAST_API void toast_count_tasks(int more) {
  const auto stream = mx::default_stream(mx::Device::cpu);
  for (; more > 0; more--) mx::scheduler::notify_new_task(stream);
  for (; more < 0; more++) mx::scheduler::notify_task_completion(stream);
}

}  // extern "C"
