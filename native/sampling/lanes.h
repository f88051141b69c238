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
