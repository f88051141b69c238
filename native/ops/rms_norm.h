// RMSNorm (Zhang & Sennrich 2019, eq. 4) of the eager model, whose rows may be bf16; that of plans is norm.h.
//
// The order of additions is fixed by the 16 lanes, not by the hardware, and contraction is off (CMakeLists.txt):
// every instruction set gives the same bits. T is float, or bfloat16 as its bits; all arithmetic is fp32, and only the
// result is rounded to T.
#pragma once
#include <cstdint>

#include "isa/simd.h"
#include "isa/table.h"

namespace quire {
namespace {  // Each translation unit compiles its own copy with its own flags.

inline float widen(float value) { return value; }
inline float widen(bfloat16_bits bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename T>
T narrow(float value);
template <>
inline float narrow<float>(float value) {
  return value;
}
template <>
inline bfloat16_bits narrow<bfloat16_bits>(float value) {
  return to_bf16(value);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t num_rows, int64_t width, float epsilon) {
  for (int64_t row = 0; row < num_rows; ++row, x += width, out += width) {
    float sums[kLanes] = {};
    const int64_t whole = width - width % kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = widen(x[i + lane]);
        sums[lane] += value * value;
      }
    }
    for (int64_t i = whole; i < width; ++i) {
      const float value = widen(x[i]);
      sums[i - whole] += value * value;
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    const float scale = 1.0f / __builtin_sqrtf(sums[0] / static_cast<float>(width) + epsilon);
    for (int64_t i = 0; i < width; ++i) {
      out[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
    }
  }
}

}  // namespace
}  // namespace quire
