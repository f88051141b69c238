// Storing sixteen fp32 lanes as fp16: nearest, ties to even; NaN stays NaN.
#pragma once
#include "isa/simd.h"

namespace quire {
namespace {

#if defined(__AVX512F__)

inline void store_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

inline void store_f16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(QUIRE_NEON)

inline void store_f16(uint16_t* p, F32x16 a) {
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

#else

inline uint16_t to_f16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the smallest normal half: a multiple of 2^-24
    memcpy(&value, &magnitude, sizeof value);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_nearbyintf(value * 0x1p24f)));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}
inline void store_f16(uint16_t* p, F32x16 a) {
  uint16_t narrow[kLanes];
  for (int i = 0; i < kLanes; ++i) narrow[i] = to_f16(lane(a, i));
  memcpy(p, narrow, sizeof narrow);
}

#endif

}  // namespace
}  // namespace quire
