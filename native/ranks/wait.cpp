#include "ranks/wait.h"

#include <sched.h>

#include "threads/system.h"

namespace quire {
namespace {

constexpr int kYields = 20'000;          // some 10 ms
constexpr int kYieldsBetweenLooks = 16;  // at the word that says that the ranks have given up

}  // namespace

bool wait_for_word(const uint32_t* word, uint32_t value, const uint32_t* gave_up, int32_t num_spins, int32_t sleep_us) {
  const auto is_there = [&] { return static_cast<int32_t>(read_word(word) - value) >= 0; };
  for (int i = 0; i < num_spins; ++i) {
    if (is_there()) return true;
    pause_spinning();
  }
  for (int i = 0;; ++i) {
    if (is_there()) return true;
    if (i % kYieldsBetweenLooks == 0 && read_word(gave_up) != 0) return false;
    if (i < kYields) {
      sched_yield();
    } else {
      const uint32_t seen = read_word(word);
      if (!is_there()) sleep_on(word, seen, int64_t{1000} * sleep_us, Sleepers::anywhere);
    }
  }
}

void wake(const uint32_t* word) { wake_sleepers(word, 1, Sleepers::anywhere); }

}  // namespace quire
