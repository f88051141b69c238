// Vectors of eight lanes, and what packing does with them. In a file of functions for several instruction sets: always
// inlined.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "weights/wide.h"

namespace quire {

// Eight lanes in a vector of the compiler's: one register with AVX2, two without. It makes no vectors of its own of
// loops that choose between values: such code took ten times as long.
using Floats = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Unsigned = uint32_t __attribute__((vector_size(32)));
using Octets = uint8_t __attribute__((vector_size(32)));
using Eight = uint8_t __attribute__((vector_size(8)));
using Fours = int32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(16)));
using Shorts = uint16_t __attribute__((vector_size(32)));
using Two = uint64_t __attribute__((vector_size(16)));
using Longs = uint64_t __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));
constexpr int64_t kParts = 8;

template <typename To, typename From>
[[gnu::always_inline]] static inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <typename To>
[[gnu::always_inline]] static inline To vector_at(const void* p) {
  To values;
  std::memcpy(&values, p, sizeof values);
  return values;
}
[[gnu::always_inline]] static inline Floats floats_at(const float* p) { return vector_at<Floats>(p); }
// The nearest integers within 0 … 255 of values below 2^22, ties to even: adding 1.5 * 2^23 rounds so.
[[gnu::always_inline]] static inline Words rounded_to_byte(Floats value) {
  const Words none = {}, most = none + 255;
  Words rounded = same_bits<Words>(value + 12582912.0f) - 0x4b400000;
  rounded = rounded > none ? rounded : none;
  return rounded < most ? rounded : most;
}

// Whether values of at most these magnitudes, times `inverse` and plus 128, round to 0 … 255.
[[gnu::always_inline]] static inline bool are_bytes(Floats magnitudes, Floats inverse) {
  const auto within = same_bits<Longs>(magnitudes * inverse < 127.25f);
  return (within[0] & within[1] & within[2] & within[3]) == ~uint64_t{0};
}
// Byte k of each word is round(values[k] * inverse) + 128, kept within 0 … 255 if kIsKept, which only are_bytes spares.
template <bool kIsKept>
[[gnu::always_inline]] static inline Words four_bytes(const Floats* values, Floats inverse) {
  Unsigned bytes = {};
#pragma GCC unroll 4
  for (int32_t k = 0; k < 4; ++k) {
    const Floats value = values[k] * inverse + 128.0f;
    bytes += same_bits<Unsigned>(kIsKept ? rounded_to_byte(value) : same_bits<Words>(value + 12582912.0f)) << (8 * k);
  }
  // 1.5 * 2^23 is 0x4b400000, and moved by 8 bits 0x40000000.
  return same_bits<Words>(kIsKept ? bytes : bytes - (0x4b400000u + 0x40000000u));
}

// round_to_f16 and from_f16 of eight values that are not negative (a NaN may have a sign); `bits` becomes fp16's.
[[gnu::always_inline]] static inline Floats round_halves(Floats value, Words& bits) {
  const Words magnitude = same_bits<Words>(value) & 0x7fffffff, zero = {}, least = zero + 0x38800000;  // 2^-14
  const Words exponent = magnitude & 0x7f800000;
  const auto power = same_bits<Floats>((exponent > least ? exponent : least) + (13 << 23));
  const Floats rounded = (value + power) - power;
  const Words normal = (same_bits<Words>(rounded) - 0x38000000) >> 13;
  const Words denormal = __builtin_convertvector(rounded * 0x1p24f, Words);
  bits = same_bits<Words>(rounded) >= least ? normal : denormal;
  const Words is_large = magnitude >= 0x47800000;  // from 65536 on
  const Words special = magnitude > 0x7f800000 ? zero + 0x7e00 : zero + 0x7c00;
  bits = is_large ? special : bits;
  return same_bits<Floats>(is_large ? special << 16 | 0x7f800000 : same_bits<Words>(rounded));
}

// Halves of steps, and the inverse of the rounded ones, or 0.
[[gnu::always_inline]] static inline void put_steps(Floats step, uint16_t* d, float* inverses) {
  Words bits;
  step = round_halves(step, bits);
  const auto halves = __builtin_convertvector(bits, Halves);
  std::memcpy(d, &halves, sizeof halves);
  const auto inverse = same_bits<Floats>((step > 0.0f) & same_bits<Words>(1.0f / step));
  std::memcpy(inverses, &inverse, sizeof inverse);
}

// 16 bytes of each of eight rows: to[i] has word i of all rows.
[[gnu::always_inline]] static inline void four_words(const Bytes* rows, Words* to) {
  Words fours[4], both[4];
  for (int i = 0; i < 4; ++i) {
    const auto a = vector_at<Two>(rows[i]), b = vector_at<Two>(rows[i + 4]);
    both[i] = same_bits<Words>(__builtin_shufflevector(a, b, 0, 1, 2, 3));
  }
  for (int i = 0; i < 2; ++i) {
    fours[i] = __builtin_shufflevector(both[2 * i], both[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    fours[i + 2] = __builtin_shufflevector(both[2 * i], both[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = __builtin_shufflevector(fours[2 * i], fours[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13);
    to[2 * i + 1] = __builtin_shufflevector(fours[2 * i], fours[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  }
}

// Lane r of vector i becomes lane i of vector r.
[[gnu::always_inline]] static inline void transpose(Halves* v) {
  for (int step = 0; step < 3; ++step) {
    Halves turned[8];
    for (int i = 0; i < 4; ++i) {
      turned[2 * i] = __builtin_shufflevector(v[i], v[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      turned[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    std::memcpy(v, turned, sizeof turned);
  }
}

// Writes a line that nothing reads soon, without fetching it first. finish_lines() before other threads may read it.
[[gnu::always_inline]] static inline void stream_line(std::byte* out, const Words& first, const Words& second) {
#if defined(__SSE2__)
  __m128i parts[4];
  std::memcpy(parts, &first, sizeof first);
  std::memcpy(parts + 2, &second, sizeof second);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(out) + i, parts[i]);
#else
  std::memcpy(out, &first, sizeof first);
  std::memcpy(out + sizeof first, &second, sizeof second);
#endif
}
static inline void finish_lines() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes a vector of eight lanes, but for the first `kept`, which belong to others.
template <typename Lanes>
[[gnu::always_inline]] static inline void put_lanes(std::byte* out, const Lanes& lanes, int64_t kept) {
  if (kept == 0) {
    std::memcpy(out, &lanes, sizeof lanes);
  } else {
    const size_t before = sizeof lanes / kParts * static_cast<size_t>(kept);
    std::memcpy(out + before, reinterpret_cast<const std::byte*>(&lanes) + before, sizeof lanes - before);
  }
}

}  // namespace quire
