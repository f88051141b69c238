// How a rank waits for a word that another rank writes in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int64_t kLine = 128;  // bytes: a word on its own pair of cache lines

inline uint32_t read_word(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void write_word(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Returns when `word` is `value` or later; false when `gave_up` is not 0. `num_spins`: looks before the core is offered
// to others. After some 10 ms the thread sleeps until `wake`, and looks again after `sleep_us` in any case.
bool wait_for_word(const uint32_t* word, uint32_t value, const uint32_t* gave_up, int32_t num_spins,
                   int32_t sleep_us = 100);
// Wakes the thread that sleeps on a word, in any process.
void wake(const uint32_t* word);

}  // namespace quire
