#include "weights/encode.h"

#include <cstring>

#include "weights/half.h"
#include "weights/wide.h"

namespace quire {
namespace {

// Eight lanes in a vector of the compiler's: one register with AVX2, two without. It makes no vectors of its own of
// loops that choose between values: such code took ten times as long.
using Floats = float __attribute__((vector_size(32)));
using Words = int32_t __attribute__((vector_size(32)));
using Octets = uint8_t __attribute__((vector_size(32)));
constexpr int64_t kParts = 8, kVectors = kBlock / kParts;

template <typename To, typename From>
[[gnu::always_inline]] inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
[[gnu::always_inline]] inline Floats floats_at(const float* p) {
  Floats values;
  std::memcpy(&values, p, sizeof values);
  return values;
}
[[gnu::always_inline]] inline float largest(Floats a) {
  Floats b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a = a > b ? a : b;
  b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  a = a > b ? a : b;
  return a[0] > a[1] ? a[0] : a[1];
}

// Of each block the lowest and the highest value, or the highest magnitude twice, and 0, or NaN where a value is not
// finite.
struct Extents {
  float low[kInputsAtOnce / kBlock], high[kInputsAtOnce / kBlock], check[kInputsAtOnce / kBlock];
};

template <bool kOfMagnitudes>
[[gnu::always_inline]] inline void find_extents(const float* values, int64_t num_blocks, Extents& to) {
  for (int64_t b = 0; b < num_blocks; ++b, values += kBlock) {
    Floats low = floats_at(values), high = low, check = low * 0.0f;
    for (int64_t i = kParts; i < kBlock; i += kParts) {
      const Floats value = floats_at(values + i);
      low = value < low ? value : low;
      high = value > high ? value : high;
      check += value * 0.0f;
    }
    if constexpr (kOfMagnitudes) {
      to.high[b] = largest(high > -low ? high : -low);
    } else {
      to.high[b] = largest(high);
      to.low[b] = -largest(-low);
    }
    check += __builtin_shufflevector(check, check, 4, 5, 6, 7, 0, 1, 2, 3);
    check += __builtin_shufflevector(check, check, 2, 3, 0, 1, 6, 7, 4, 5);
    to.check[b] = check[0] + check[1];
  }
}

// round((value + shift) * inverse) + offset, kept within 0 … limit. Adding 1.5 * 2^23 rounds to nearest, ties to even.
[[gnu::always_inline]] inline void quantise(const float* values, float shift, float step, float offset, float limit,
                                            uint8_t* out) {
  const Floats none = {}, most = none + limit;
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
  Words all = {};  // byte k of word l is value 8 k + l
  for (int64_t k = 0; k < kVectors; ++k) {
    Floats value = (floats_at(values + k * kParts) + shift) * inverse + offset;
    value = value > none ? value : none;  // also where it is NaN
    value = value < most ? value : most;
    all |= (same_bits<Words>(value + 12582912.0f) & 255) << static_cast<int32_t>(8 * k);
  }
  const auto octets = same_bits<Octets>(all);
  const Octets ordered = __builtin_shufflevector(octets, octets, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25,
                                                 29, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  std::memcpy(out, &ordered, sizeof ordered);
}

}  // namespace

QUIRE_WIDE
void quantise_q8(const float* values, int64_t num_blocks, Quantised& to) {
  Extents extents;
  find_extents<true>(values, num_blocks, extents);
  for (int64_t b = 0; b < num_blocks; ++b) to.d[b] = round_to_f16(extents.high[b] / 127.0f + extents.check[b]);
  for (int64_t b = 0; b < num_blocks; ++b) {
    quantise(values + b * kBlock, 0.0f, from_f16(to.d[b]), 128.0f, 255.0f, to.u + b * kBlock);
  }
}

QUIRE_WIDE
void quantise_q4m(const float* values, int64_t num_blocks, Quantised& to) {
  Extents extents;
  find_extents<false>(values, num_blocks, extents);
  for (int64_t b = 0; b < num_blocks; ++b) {
    to.d[b] = round_to_f16((extents.high[b] - extents.low[b]) / 15.0f + extents.check[b]);
    to.m[b] = round_to_f16(extents.low[b]);
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    quantise(values + b * kBlock, -from_f16(to.m[b]), from_f16(to.d[b]), 0.0f, 15.0f, to.u + b * kBlock);
  }
}

}  // namespace quire
