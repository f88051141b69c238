// QUIRE_WIDE before a function: it is compiled for AVX2 too, and the program chooses when it is loaded. For loops over
// bytes and floats outside of isa/; as there, contraction is off, so that both give the same bits.
#pragma once
#include <cstdint>  // defines __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define QUIRE_WIDE
#endif
