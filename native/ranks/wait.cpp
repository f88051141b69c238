#include "ranks/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int kYields = 20'000;          // some 10 ms
constexpr int kYieldsBetweenLooks = 16;  // at the word that says that the ranks have given up

}  // namespace

bool wait_for_word(const uint32_t* word, uint32_t value, const uint32_t* gave_up, int32_t num_spins, int32_t sleep_us) {
  const auto is_there = [&] { return static_cast<int32_t>(read_word(word) - value) >= 0; };
  for (int i = 0; i < num_spins; ++i) {
    if (is_there()) return true;
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }
  for (int i = 0;; ++i) {
    if (is_there()) return true;
    if (i % kYieldsBetweenLooks == 0 && read_word(gave_up) != 0) return false;
    if (i < kYields) {
      sched_yield();
    } else {
      const timespec longest = {0, 1000L * sleep_us};
      const uint32_t seen = read_word(word);
      if (!is_there()) syscall(SYS_futex, word, FUTEX_WAIT, seen, &longest, nullptr, 0);
    }
  }
}

void wake(const uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

}  // namespace quire
