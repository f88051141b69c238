// What threads and ranks ask of the operating system: all calls in native/ that only Linux has. A port to another
// system is this file.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

// For loops that look at a word again and again.
inline void pause_spinning() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // waits some tens of cycles, as x86's pause does; `yield` does nothing on most processors
#endif
}

// Threads of this process only, or of all that share the word's memory.
enum class Sleepers { here, anywhere };

// Returns when the word is woken, is not `value`, or after `most_ns` nanoseconds; now and then without a reason.
inline void sleep_on(const uint32_t* word, uint32_t value, int64_t most_ns, Sleepers sleepers) {
  const timespec most = {most_ns / 1'000'000'000, most_ns % 1'000'000'000};
  const int operation = sleepers == Sleepers::here ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  syscall(SYS_futex, word, operation, value, &most, nullptr, 0);
}

inline void wake_sleepers(const uint32_t* word, int32_t most, Sleepers sleepers) {
  const int operation = sleepers == Sleepers::here ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
  syscall(SYS_futex, word, operation, most, nullptr, nullptr, 0);
}

// Which CPU belongs to which thread, where there are as many of them as this process may use. The kernel often leaves
// two threads on one CPU for a while, and steps then take twice as long.
class Cores {
 public:
  explicit Cores(int num_threads) {
    if (sched_getaffinity(0, sizeof(all_), &all_) != 0 || CPU_COUNT(&all_) != num_threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &all_)) cpus_.push_back(cpu);
    }
  }

  // Moves the calling thread to its CPU and leaves it free to be moved again: when other processes are busy there, a
  // thread that may not leave waits for them, and all others for it. A thread that is bound already stays where it is.
  void settle(int thread) const {
    if (cpus_.empty() || sched_getcpu() == cpus_[thread]) return;
    cpu_set_t now, one;
    if (sched_getaffinity(0, sizeof(now), &now) != 0 || !CPU_EQUAL(&now, &all_)) return;
    CPU_ZERO(&one);
    CPU_SET(cpus_[thread], &one);
    sched_setaffinity(0, sizeof(one), &one);
    sched_setaffinity(0, sizeof(all_), &all_);
  }

 private:
  cpu_set_t all_;
  std::vector<int> cpus_;  // by thread; none where threads may run anywhere
};

}  // namespace quire
