// Vectors of eight lanes, and what packing does with them. In a file of functions for several instruction sets: always
// inlined.
#pragma once
#include <cstdint>
#include <cstring>

namespace quire {

// Eight lanes in a vector of the compiler's: one register with AVX2, two without. It makes no vectors of its own of
// loops that choose between values: such code took ten times as long.
using Floats = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Octets = uint8_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));
using Two = uint64_t __attribute__((vector_size(16)));
using Longs = uint64_t __attribute__((vector_size(32)));
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

// Lane r of to[i] becomes lane i of from[r].
[[gnu::always_inline]] static inline void transpose(const Words* from, Words* to) {
  Words pairs[8], fours[8];
  for (int i = 0; i < 4; ++i) {
    const Words a = from[2 * i], b = from[2 * i + 1];
    pairs[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[2 * i + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 4; ++i) {
    const Words a = pairs[i / 2 * 4 + i % 2], b = pairs[i / 2 * 4 + i % 2 + 2];
    fours[2 * i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    fours[2 * i + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    to[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    to[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

}  // namespace quire
