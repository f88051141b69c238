// Dot products of bf16 pairs, as VDPBF16PS computes them: lane += x.odd * w.odd, then lane += x.even * w.even, each a
// fused multiply-add rounded to nearest. The instruction treats denormals as zero whatever MXCSR says; so do all
// threads of a plan (pool.cpp), which makes the two fused multiply-adds of the other instruction sets give its bits.
// Checked on Zen 4 with 48 million random and adversarial sums.
#pragma once
#include <cstddef>

#include "isa/simd.h"

namespace quire {
namespace {

// QUIRE_BF16_PAIRS: pairs are multiplied as they are stored.
#if defined(__AVX512BF16__)

#define QUIRE_BF16_PAIRS 1
struct Pairs {
  __m512bh v;
};
using BroadcastPair = Pairs;
inline Pairs load_pairs(const std::byte* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline Pairs broadcast_pair(const std::byte* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return {(__m512bh)_mm512_set1_epi32(pair)};
}
inline F32x16 dot2(Pairs a, Pairs b, F32x16 y) { return {_mm512_dpbf16_ps(y.v, a.v, b.v)}; }

#elif defined(QUIRE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#define QUIRE_BF16_PAIRS 1
// BFMLALT and BFMLALB are fused multiply-adds of the odd and of the even halves. BFDOT and BFMMLA are not used: they
// round products and sums to odd, not to nearest.
struct Pairs {
  bfloat16x8_t v[4];
};
using BroadcastPair = bfloat16x4_t;  // a pair, twice
inline Pairs load_pairs(const std::byte* p) {
  Pairs r;
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) r.v[i] = vld1q_bf16(reinterpret_cast<const bfloat16_t*>(p) + 8 * i);
  return r;
}
inline BroadcastPair broadcast_pair(const std::byte* p) {
  return vreinterpret_bf16_s32(vld1_dup_s32(reinterpret_cast<const int32_t*>(p)));
}
inline F32x16 dot2(const Pairs& a, BroadcastPair b, F32x16 y) {
  QUIRE_QUARTERS(F32x16, vbfmlalbq_lane_f32(vbfmlaltq_lane_f32(y.v[i], a.v[i], b, 1), a.v[i], b, 0));
}

#else

// even_of_pairs, odd_of_pairs: those of 16 pairs. widen_odd_even: all as 32 floats, odd before even. rounded_to_bf16:
// fp32 with the values that store_bf16 stores.

#if defined(__AVX512F__)
inline F32x16 even_of_pairs(const std::byte* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline F32x16 odd_of_pairs(const std::byte* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)))};
}
inline F32x16 rounded_to_bf16(F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), high = _mm512_set1_epi32(-65536);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_and_si512(_mm512_add_epi32(bits, half), high);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(_mm512_and_si512(bits, high), _mm512_set1_epi32(0x400000));
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, nan, quiet))};
}
inline void widen_odd_even(const std::byte* p, float* wide) {
  const __m512i swapped = _mm512_ror_epi32(_mm512_loadu_si512(p), 16);
  const __m256i lo = _mm512_castsi512_si256(swapped), hi = _mm512_extracti64x4_epi64(swapped, 1);
  _mm512_storeu_si512(wide, _mm512_slli_epi32(_mm512_cvtepu16_epi32(lo), 16));
  _mm512_storeu_si512(wide + kLanes, _mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16));
}
#elif defined(__AVX2__)
inline __m256 even8(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd8(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536))); }
inline __m256i load8(const std::byte* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline F32x16 even_of_pairs(const std::byte* p) { return {even8(load8(p)), even8(load8(p + 32))}; }
inline F32x16 odd_of_pairs(const std::byte* p) { return {odd8(load8(p)), odd8(load8(p + 32))}; }
inline __m256 round8_to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_set1_epi32(-65536);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_and_si256(_mm256_add_epi32(bits, half), high);
  const __m256i quiet = _mm256_or_si256(_mm256_and_si256(bits, high), _mm256_set1_epi32(0x400000));
  return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline F32x16 rounded_to_bf16(F32x16 a) { return {round8_to_bf16(a.lo), round8_to_bf16(a.hi)}; }
inline void widen_odd_even(const std::byte* p, float* wide) {
  for (int i = 0; i < kLanes; i += 8, p += 32, wide += 16) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    const __m256 even = even8(pairs), odd = odd8(pairs);
    const __m256 lo = _mm256_unpacklo_ps(odd, even), hi = _mm256_unpackhi_ps(odd, even);
    _mm256_storeu_ps(wide, _mm256_permute2f128_ps(lo, hi, 0x20));
    _mm256_storeu_ps(wide + 8, _mm256_permute2f128_ps(lo, hi, 0x31));
  }
}
#elif defined(QUIRE_NEON)
inline uint32x4_t load4(const std::byte* p) {
  return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)));
}
inline float32x4_t even4(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
inline float32x4_t odd4(uint32x4_t pairs) { return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u))); }
inline F32x16 even_of_pairs(const std::byte* p) { QUIRE_QUARTERS(F32x16, even4(load4(p + 16 * i))); }
inline F32x16 odd_of_pairs(const std::byte* p) { QUIRE_QUARTERS(F32x16, odd4(load4(p + 16 * i))); }
inline F32x16 rounded_to_bf16(F32x16 a) {
  uint16_t rounded[kLanes];
  store_bf16(rounded, a);
  return widen_bf16(rounded);
}
inline void widen_odd_even(const std::byte* p, float* wide) {
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    const uint32x4_t pairs = load4(p + 16 * i);
    vst2q_f32(wide + 8 * i, {{odd4(pairs), even4(pairs)}});
  }
}
#else
inline F32x16 half_of_pairs(const std::byte* p, int half) {
  uint16_t halves[2 * kLanes];
  memcpy(halves, p, sizeof halves);
  float widened[kLanes];
  for (int i = 0; i < kLanes; ++i) widened[i] = widen1_bf16(halves[2 * i + half]);
  return load(widened);
}
inline F32x16 even_of_pairs(const std::byte* p) { return half_of_pairs(p, 0); }
inline F32x16 odd_of_pairs(const std::byte* p) { return half_of_pairs(p, 1); }
inline F32x16 rounded_to_bf16(F32x16 a) {
  uint16_t rounded[kLanes];
  store_bf16(rounded, a);
  return widen_bf16(rounded);
}
inline void widen_odd_even(const std::byte* p, float* wide) {
  const F32x16 even = even_of_pairs(p), odd = odd_of_pairs(p);
  for (int i = 0; i < kLanes; ++i) {
    wide[2 * i] = lane(odd, i);
    wide[2 * i + 1] = lane(even, i);
  }
}
#endif
// Widened, since unpacking a pair for each sum would cost more than the sum.
struct Pairs {
  F32x16 even, odd;
};
using BroadcastPair = Pairs;
inline Pairs load_pairs(const std::byte* p) { return {even_of_pairs(p), odd_of_pairs(p)}; }
// The pair is two floats here, odd before even: WidenedPairs in ops/float_formats.h.
inline BroadcastPair broadcast_pair(const std::byte* p) {
  float pair[2];
  memcpy(pair, p, sizeof pair);
  return {broadcast(pair[1]), broadcast(pair[0])};
}
inline F32x16 dot2(Pairs a, Pairs b, F32x16 y) { return fma(a.even, b.even, fma(a.odd, b.odd, y)); }

#endif

}  // namespace
}  // namespace quire
