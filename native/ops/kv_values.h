// fp32 rows of one head as the values of a KV format.
#pragma once
#include "isa/simd_f16.h"
#include "isa/simd_f8.h"
#include "plan/types.h"

namespace quire {
namespace {

// `width` values, a multiple of 16, as int8 with a common scale: max|x| / 127, which is returned. A NaN or an infinity
// becomes a NaN scale, so that it reaches the result.
inline float quantise_head(const float* x, int64_t width, int8_t* out) {
  F32x16 most = zero(), check = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    most = max(abs(load(x + i)), most);
    check = fma(load(x + i), zero(), check);  // max loses a NaN
  }
  const float highest = largest(most), inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
  for (int64_t i = 0; i < width; i += kLanes) {
    int32_t wide[kLanes];
    store(wide, round_to_int(load(x + i) * broadcast(inverse)));
    for (int lane = 0; lane < kLanes; ++lane) out[i + lane] = static_cast<int8_t>(wide[lane]);
  }
  // Not the sum itself: a NaN of the model's may have bits that exp2_of_non_positive would take for an exponent.
  return sum(check) == 0.0f ? highest / 127.0f : __builtin_nanf("");
}

// `width` values, a multiple of 16, as `format`; returned is the scale of int8.
inline float narrow_head(KvFormat format, const float* x, int64_t width, std::byte* out) {
  if (format == KvFormat::i8) return quantise_head(x, width, reinterpret_cast<int8_t*>(out));
  for (int64_t i = 0; i < width; i += kLanes) {
    if (format == KvFormat::f32) {
      store(reinterpret_cast<float*>(out) + i, load(x + i));
    } else if (format == KvFormat::f16) {
      store_f16(reinterpret_cast<uint16_t*>(out) + i, load(x + i));
    } else if (format == KvFormat::e4m3) {
      store_e4m3(reinterpret_cast<uint8_t*>(out) + i, load(x + i));
    } else if (format == KvFormat::e5m2) {
      store_e5m2(reinterpret_cast<uint8_t*>(out) + i, load(x + i));
    } else {
      store_bf16(reinterpret_cast<uint16_t*>(out) + i, load(x + i));
    }
  }
  return 1.0f;
}

}  // namespace
}  // namespace quire
