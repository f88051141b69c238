// Storing sixteen fp32 lanes as 16-bit floats: nearest, ties to even; NaN stays NaN.
#pragma once
#include "isa/simd.h"

namespace quire {
namespace {

#if defined(__AVX512F__)

inline void store_bf16(uint16_t* p, F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}
inline void store_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

inline __m128i to_bf16_8(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  return _mm256_castsi256_si128(packed);
}
inline void store_bf16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128((__m128i*)p, to_bf16_8(a.lo));
  _mm_storeu_si128((__m128i*)(p + 8), to_bf16_8(a.hi));
}
inline void store_f16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

#else

inline void store_bf16(uint16_t* p, F32x16 a) {
  uint16_t narrow[kLanes];
  for (int i = 0; i < kLanes; ++i) narrow[i] = to_bf16(a.v[i]);
  memcpy(p, narrow, sizeof narrow);
}
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
  for (int i = 0; i < kLanes; ++i) narrow[i] = to_f16(a.v[i]);
  memcpy(p, narrow, sizeof narrow);
}

#endif

}  // namespace
}  // namespace quire
