// FP8 as sixteen fp32 lanes, and back: e4m3 (four exponent bits, no infinity, 0x7f a NaN) and e5m2 (OCP OFP8 1.0).
#pragma once
#include "isa/simd.h"

namespace quire {
namespace {

// e4m3 as fp16 is 2^-8 of its value, the exponents' biases being 7 and 15. Shifted, a sign-extended byte has its sign
// twice; one more than a NaN's exponent and fraction carries into the exponent's highest bit.
#if defined(__AVX2__)

inline F32x16 widen_halves(__m256i halves) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(halves)};
#else
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}
inline __m256i sixteen_shorts(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }

inline F32x16 widen_e5m2(const uint8_t* p) { return widen_halves(_mm256_slli_epi16(sixteen_shorts(p), 8)); }

inline F32x16 widen_e4m3(const uint8_t* p) {
  const __m256i top = _mm256_set1_epi16(0x4000), shifted = _mm256_slli_epi16(sixteen_shorts(p), 7);
  const __m256i finite = _mm256_andnot_si256(top, shifted);
  const __m256i nan = _mm256_and_si256(_mm256_add_epi16(finite, _mm256_set1_epi16(0x80)), top);
  const __m256i halves = _mm256_or_si256(finite, nan);
  return widen_halves(halves) * broadcast(256.0f);
}

#elif defined(QUIRE_NEON)

inline F32x16 widen_halves(int16x8_t first, int16x8_t second) {
  const float16x8_t a = vreinterpretq_f16_s16(first), b = vreinterpretq_f16_s16(second);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}
inline F32x16 widen_e5m2(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  return widen_halves(vshll_n_s8(vget_low_s8(bytes), 8), vshll_high_n_s8(bytes, 8));
}
inline int16x8_t e4m3_as_halves(int16x8_t shifted) {
  const int16x8_t top = vdupq_n_s16(0x4000), finite = vbicq_s16(shifted, top);
  return vorrq_s16(finite, vandq_s16(vaddq_s16(finite, vdupq_n_s16(0x80)), top));
}
inline F32x16 widen_e4m3(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t first = vshll_n_s8(vget_low_s8(bytes), 7), second = vshll_high_n_s8(bytes, 7);
  return widen_halves(e4m3_as_halves(first), e4m3_as_halves(second)) * broadcast(256.0f);
}

#else

inline F32x16 widen_e5m2(const uint8_t* p) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(p[i] << 8);
  return widen_f16(halves);
}
inline F32x16 widen_e4m3(const uint8_t* p) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int magnitude = p[i] & 0x7f;
    halves[i] = static_cast<uint16_t>((magnitude << 7) | ((p[i] & 0x80) << 8) | (magnitude == 0x7f ? 0x4000 : 0));
  }
  return widen_f16(halves) * broadcast(256.0f);
}

#endif

// Nearest, ties to even. Finite values past the largest become the largest, infinity a NaN.
template <int kFractionBits, int kBias>
inline uint8_t to_f8(float value, float largest) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu, most;
  if (magnitude >= 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  memcpy(&most, &largest, sizeof most);
  magnitude = magnitude < most ? magnitude : most;
  constexpr uint32_t kDropped = 23 - kFractionBits, kLeast = static_cast<uint32_t>(128 - kBias) << 23;
  if (magnitude < kLeast) {  // below the smallest normal number: a multiple of 2^(1 - bias - fraction bits)
    memcpy(&value, &magnitude, sizeof value);
    constexpr float kUnits = static_cast<float>(1 << (kBias - 1 + kFractionBits));
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(__builtin_nearbyintf(value * kUnits)));
  }
  const uint32_t rounded = magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
  return static_cast<uint8_t>(sign | ((rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped));
}
inline void store_e4m3(uint8_t* p, F32x16 a) {
  float wide[kLanes];
  store(wide, a);
  for (int i = 0; i < kLanes; ++i) p[i] = to_f8<3, 7>(wide[i], 448.0f);
}
inline void store_e5m2(uint8_t* p, F32x16 a) {
  float wide[kLanes];
  store(wide, a);
  for (int i = 0; i < kLanes; ++i) p[i] = to_f8<2, 15>(wide[i], 57344.0f);
}

}  // namespace
}  // namespace quire
