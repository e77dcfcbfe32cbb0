// The thread pool. Indices are claimed one at a time from a shared counter, so a descheduled thread
// delays the one index it holds, not a whole share. Idle threads spin briefly, as the next
// operation is usually near, giving way to whatever else wants their processor, then sleep on a
// futex; the caller never sleeps.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>

namespace toast {
namespace {

using std::atomic;
using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;

constexpr auto SPIN = std::chrono::microseconds(50);  // the best, with other processes busy
constexpr int SPINS_PER_CHECK = 32;                   // before giving way
constexpr int SPINS_BEFORE_YIELD = 2000;              // while others finish their last indices

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until number != seen or a wake-up; may wake spuriously.
void sleep_while(atomic<uint32_t> &number, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&number), FUTEX_WAIT_PRIVATE, seen, nullptr,
          nullptr, 0);
}
void wake_all(atomic<uint32_t> &number) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&number), FUTEX_WAKE_PRIVATE, MAX_THREADS,
          nullptr, nullptr, 0);
}

// The job at work. A ticket holds the job's number (upper half) and its next index (lower half) in
// one word: who claims an index knows that it belongs to this job, and that the job cannot end
// before the index is done.
struct Pool {
  alignas(64) atomic<uint64_t> ticket{0};
  alignas(64) atomic<uint32_t> remaining{0};
  alignas(64) atomic<uint32_t> job{0};  // number; idle threads watch it
  atomic<uint32_t> sleepers{0};
  atomic<uint32_t> wanted{1};  // threads, the caller included
  atomic<uint32_t> count{0};
  atomic<void (*)(void *, int64_t)> work{nullptr};
  atomic<void *> context{nullptr};
  std::mutex busy;
  uint32_t started = 1;

  bool claim(uint32_t number) {
    uint64_t now = ticket.load(memory_order_acquire);
    for (;;) {
      if (uint32_t(now >> 32) != number) return false;
      // These may be a later job's; then the exchange fails: who has read its count, which is
      // written last, also sees that the ticket was closed before.
      auto function = work.load(memory_order_relaxed);
      void *argument = context.load(memory_order_relaxed);
      if (uint32_t(now) >= count.load(memory_order_acquire)) return false;
      if (!ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      function(argument, uint32_t(now));
      remaining.fetch_sub(1, memory_order_release);
      return true;
    }
  }

  void wait_for_job(uint32_t seen) {
    auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < SPINS_PER_CHECK; i++) {
        if (job.load(memory_order_acquire) != seen) return;
        cpu_pause();
      }
      sched_yield();
    } while (std::chrono::steady_clock::now() < until);
    sleepers.fetch_add(1, memory_order_seq_cst);
    while (job.load(memory_order_seq_cst) == seen) sleep_while(job, seen);
    sleepers.fetch_sub(1, memory_order_relaxed);
  }

  void worker(uint32_t place) {
    for (uint32_t seen = 0;;) {
      wait_for_job(seen);
      seen = job.load(memory_order_acquire);
      if (place >= wanted.load(memory_order_relaxed)) continue;
      while (claim(seen)) {
      }
    }
  }

  void start() {
    if (started >= wanted.load(memory_order_relaxed)) return;
    sigset_t all, before;  // signals go to threads that wait for them
    sigfillset(&all);
    sigdelset(&all, SIGBUS);  // but SIGBUS is for the thread that faults
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; started < wanted.load(memory_order_relaxed); started++)
        std::thread([this, place = started] { worker(place); }).detach();
    } catch (...) {  // thread limit: make do with those started, and do not try again
      wanted.store(started, memory_order_relaxed);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void share(uint32_t indices, void (*function)(void *, int64_t), void *argument, bool wake) {
    start();
    uint32_t number = job.load(memory_order_relaxed) + 1;
    // Closed (index UINT32_MAX) while the job is written, so that a late thread claims nothing.
    ticket.store(uint64_t(number) << 32 | UINT32_MAX, memory_order_release);
    remaining.store(indices, memory_order_relaxed);
    work.store(function, memory_order_relaxed);
    context.store(argument, memory_order_relaxed);
    count.store(indices, memory_order_release);
    ticket.store(uint64_t(number) << 32, memory_order_release);
    job.store(number, memory_order_seq_cst);
    if (wake && sleepers.load(memory_order_seq_cst)) wake_all(job);
    while (claim(number)) {
    }
    for (int spins = 0; remaining.load(memory_order_acquire); spins++) {
      if (spins < SPINS_BEFORE_YIELD) {
        cpu_pause();
      } else {
        sched_yield();
      }
    }
  }
};

// Never destroyed: its threads may outlive main. A forked child has none of them, and perhaps a job
// of theirs that nobody ends, so it gets a new pool.
Pool *const pool = [] {
  pthread_atfork(nullptr, nullptr, [] {
    const uint32_t wanted = pool->wanted.load(memory_order_relaxed);
    new (pool) Pool;
    pool->wanted.store(wanted, memory_order_relaxed);
  });
  return new Pool;
}();

}  // namespace

void run(int64_t count, void (*work)(void *, int64_t), void *context, bool wake) {
  Pool &p = *pool;
  bool serial = count <= 1 || count >= UINT32_MAX || p.wanted.load(memory_order_relaxed) <= 1;
  if (serial || !p.busy.try_lock()) {
    for (int64_t i = 0; i < count; i++) work(context, i);
    return;
  }
  p.share(uint32_t(count), work, context, wake);
  p.busy.unlock();
}

void set_threads(int count) {
  pool->wanted.store(count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count,
                     memory_order_relaxed);
}

int threads() { return int(pool->wanted.load(memory_order_relaxed)); }

}  // namespace toast
