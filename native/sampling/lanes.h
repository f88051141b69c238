// What sampling needs beyond isa/simd.h: comparisons as bit masks of the lanes, and sums of integers.
#pragma once
#include "isa/simd.h"

namespace quire {
namespace {

#if defined(__AVX512F__)

inline uint32_t at_least(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t greater(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t equal(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t either_nan(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }

#elif defined(__AVX2__)

inline uint32_t mask_of(__m256 lo, __m256 hi) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
inline uint32_t at_least(F32x16 a, F32x16 b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
inline uint32_t greater(F32x16 a, F32x16 b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
inline uint32_t equal(F32x16 a, F32x16 b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline uint32_t either_nan(F32x16 a, F32x16 b) {
  return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q));
}

#elif defined(QUIRE_NEON)

inline uint32_t mask_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint16x8_t first = vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  const uint16x8_t second = vuzp1q_u16(vreinterpretq_u16_u32(c), vreinterpretq_u16_u32(d));
  const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
  const uint8x16_t bits = vandq_u8(bytes, vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u)));
  return vaddv_u8(vget_low_u8(bits)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}
#define QUIRE_MASK(expression)                                \
  uint32x4_t m[4];                                            \
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) m[i] = expression; \
  return mask_of(m[0], m[1], m[2], m[3])
inline uint32_t at_least(F32x16 a, F32x16 b) { QUIRE_MASK(vcgeq_f32(a.v[i], b.v[i])); }
inline uint32_t greater(F32x16 a, F32x16 b) { QUIRE_MASK(vcgtq_f32(a.v[i], b.v[i])); }
inline uint32_t equal(F32x16 a, F32x16 b) { QUIRE_MASK(vceqq_f32(a.v[i], b.v[i])); }
inline uint32_t either_nan(F32x16 a, F32x16 b) {
  QUIRE_MASK(vmvnq_u32(vandq_u32(vceqq_f32(a.v[i], a.v[i]), vceqq_f32(b.v[i], b.v[i]))));
}
#undef QUIRE_MASK

#else

#define QUIRE_MASK(condition)                                                     \
  uint32_t mask = 0;                                                              \
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(condition) << i; \
  return mask
inline uint32_t at_least(F32x16 a, F32x16 b) { QUIRE_MASK(lane(a, i) >= lane(b, i)); }
inline uint32_t greater(F32x16 a, F32x16 b) { QUIRE_MASK(lane(a, i) > lane(b, i)); }
inline uint32_t equal(F32x16 a, F32x16 b) { QUIRE_MASK(lane(a, i) == lane(b, i)); }
inline uint32_t either_nan(F32x16 a, F32x16 b) { QUIRE_MASK(lane(a, i) != lane(a, i) || lane(b, i) != lane(b, i)); }
#undef QUIRE_MASK

#endif

// Modulo 2^32.
inline uint32_t sum(I32x16 a) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_add_epi32(a.v));
#elif defined(QUIRE_NEON)
  return static_cast<uint32_t>(vaddvq_s32((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])));
#else
  int32_t v[kLanes];
  store(v, a);
  uint32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += static_cast<uint32_t>(v[lane]);
  return total;
#endif
}

}  // namespace
}  // namespace quire
