// A number that is not known yet: what hangs on it can be handed to MLX's stream before it is, and
// begins as soon as it is named.
#include <stdlib.h>

#include <condition_variable>
#include <mutex>
#include <unordered_set>

#include "arrays.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace toast {
namespace {

std::mutex &naming = *new std::mutex;  // never destroyed: MLX's threads may outlive main
std::condition_variable &named = *new std::condition_variable;
bool leaving = false;  // the process ends: nobody is waited for

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
  std::unique_lock<std::mutex> held(naming);
  named.wait(held, [&] { return one->known || leaving; });
  *const_cast<mx::array &>(arrays[0]).data<uint32_t>() = one->number;
}

}  // namespace
}  // namespace toast

extern "C" {

// Makes `out`, an array that nobody else has, a number, uint32 (), that is awaited: MLX's stream
// waits for it when it comes there. Lazy. *place is for toast_name_awaited.
TOAST_API const char *toast_awaited_array(void *out, void **place) {
  return toast::wrong([&] {
    static const int once = atexit(toast::leave);  // before MLX waits for its threads
    toast::check(once == 0, "no room to be told of the end");
    auto one = std::make_shared<toast::Awaited>();
    toast::array_of(out) =
        toast::made("ToastAwaited", {}, mx::uint32, {},
                    [one](const toast::Arrays &arrays) { toast::wait_for(one, arrays); });
    *place = new toast::Shared(one);
  });
}

// Names it, once; the place is gone then.
TOAST_API void toast_name_awaited(void *place, uint32_t number) {
  std::unique_ptr<toast::Shared> one(static_cast<toast::Shared *>(place));
  std::lock_guard<std::mutex> held(toast::naming);
  (*one)->known = true, (*one)->number = number;
  toast::named.notify_all();
}

// The process ends: what is awaited is not waited for any more.
TOAST_API void toast_leave(void) { toast::leave(); }

// Operations that are still to be handed over before an array is there.
TOAST_API int toast_operations(void *x) {
  std::unordered_set<std::uintptr_t> seen;
  toast::Arrays open = {toast::array_of(x)};
  while (!open.empty()) {
    const mx::array one = std::move(open.back());
    open.pop_back();
    if (!one.has_primitive() || one.status() != mx::array::Status::unscheduled) continue;
    if (!seen.insert(one.id()).second) continue;
    open.insert(open.end(), one.inputs().begin(), one.inputs().end());
  }
  return int(seen.size());
}

// Has MLX count so many unfinished tasks more. Its eval waits while there are many; where they wait
// for a number that the caller is yet to name, that would be for ever.
TOAST_API void toast_count_tasks(int more) {
  const auto stream = mx::default_stream(mx::Device::cpu);
  for (; more > 0; more--) mx::scheduler::notify_new_task(stream);
  for (; more < 0; more++) mx::scheduler::notify_task_completion(stream);
}

}  // extern "C"
