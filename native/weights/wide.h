// QUIRE_WIDE before a function: it is compiled for AVX2 too, and the program chooses when it is loaded. For loops over
// bytes and floats outside of isa/; as there, contraction is off, so that both give the same bits. With
// QUIRE_AVX2_ALONE it is compiled for nothing else: vectors without AVX2 took a tenth of the time to compile
// everything.
#pragma once
#include <cstdint>  // defines __GLIBC__
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#ifdef QUIRE_AVX2_ALONE
#define QUIRE_WIDE __attribute__((target("avx2"), section(".text.avx2")))
#else
#define QUIRE_WIDE __attribute__((target_clones("avx2", "default")))
#endif
#else
#define QUIRE_WIDE
#endif

namespace quire {

using Bytes = const uint8_t*;
static inline uint32_t read_word(Bytes p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

using Sixteen = uint8_t __attribute__((vector_size(16)));

// Byte i is entries[index[i]], of indices 0 to 15. In a file of functions for several instruction sets: always inlined.
[[gnu::always_inline]] static inline Sixteen entries_at(Sixteen entries, Sixteen index) {
#if defined(__clang__)
  Sixteen found;
  for (int i = 0; i < 16; ++i) found[i] = entries[index[i]];
  return found;
#else
  return __builtin_shuffle(entries, index);
#endif
}

}  // namespace quire
