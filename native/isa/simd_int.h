// Exact integer dot products: of four u8 with four i8, and of two i8 with two i16, added to each int32 lane.
#pragma once
#include <cstddef>

#include "isa/simd.h"

namespace quire {
namespace {

#if defined(__AVX512VNNI__)

struct Quads {
  __m512i v;
};
struct Shorts {
  __m512i v;
};
inline Quads load_quads(const std::byte* p) { return {_mm512_loadu_si512(p)}; }
inline Quads broadcast_quad(const std::byte* p) {
  int32_t quad;
  memcpy(&quad, p, sizeof quad);
  return {_mm512_set1_epi32(quad)};
}
// 32 int8 as int16.
inline Shorts load_shorts(const std::byte* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
inline Shorts broadcast_shorts(const std::byte* p) { return {broadcast_quad(p).v}; }
// Sixteen int32 as int16: their low halves, or the nearest where they do not fit.
inline void store_shorts(std::byte* p, I32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
inline I32x16 dot4(Quads u, Quads s, I32x16 y) { return {_mm512_dpbusd_epi32(y.v, u.v, s.v)}; }
inline I32x16 dot2(Shorts a, Shorts b, I32x16 y) { return {_mm512_dpwssd_epi32(y.v, a.v, b.v)}; }

#elif defined(__AVX2__)

struct Quads {
  __m256i lo, hi;
};
struct Shorts {
  __m256i lo, hi;
};
inline Quads load_quads(const std::byte* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline __m256i broadcast_int(const std::byte* p) {
  int32_t value;
  memcpy(&value, p, sizeof value);
  return _mm256_set1_epi32(value);
}
#if defined(__AVXVNNI__)
inline Quads broadcast_quad(const std::byte* p) {
  const __m256i quad = broadcast_int(p);
  return {quad, quad};
}
inline I32x16 dot4(const Quads& u, const Quads& s, I32x16 y) {
  return {_mm256_dpbusd_avx_epi32(y.lo, u.lo, s.lo), _mm256_dpbusd_avx_epi32(y.hi, u.hi, s.hi)};
}
#else
// VPMADDUBSW would saturate: bytes are widened instead, those at even places apart from those at odd ones.
// Four i8, widened once for all uses: (0, 2) and (1, 3).
struct SignedQuads {
  __m256i even, odd;
};
constexpr int64_t kQuadBytes = 8;
inline void store_quad(std::byte* to, const int8_t* s) {
  const int16_t wide[4] = {s[0], s[2], s[1], s[3]};
  memcpy(to, wide, sizeof wide);
}
inline SignedQuads broadcast_quad(const std::byte* p) { return {broadcast_int(p), broadcast_int(p + 4)}; }
inline __m256i dot4(__m256i u, const SignedQuads& s, __m256i y) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), s.even);
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), s.odd);
  return _mm256_add_epi32(y, _mm256_add_epi32(even, odd));
}
inline I32x16 dot4(const Quads& u, const SignedQuads& s, I32x16 y) {
  return {dot4(u.lo, s, y.lo), dot4(u.hi, s, y.hi)};
}
#endif
inline Shorts load_shorts(const std::byte* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
inline Shorts broadcast_shorts(const std::byte* p) {
  const __m256i pair = broadcast_int(p);
  return {pair, pair};
}
inline void store_shorts(std::byte* p, I32x16 a) {
  const __m256i mixed = _mm256_packs_epi32(a.lo, a.hi);  // quarters 0, 2, 1, 3
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
#if defined(__AVXVNNI__)
inline __m256i dot2(__m256i a, __m256i b, __m256i y) { return _mm256_dpwssd_avx_epi32(y, a, b); }
#else
inline __m256i dot2(__m256i a, __m256i b, __m256i y) { return _mm256_add_epi32(y, _mm256_madd_epi16(a, b)); }
#endif
inline I32x16 dot2(Shorts a, Shorts b, I32x16 y) { return {dot2(a.lo, b.lo, y.lo), dot2(a.hi, b.hi, y.hi)}; }

#elif defined(QUIRE_NEON)

#if defined(__ARM_FEATURE_MATMUL_INT8)
struct Quads {
  uint8x16_t v[4];
};
using SignedQuads = int8x8_t;  // four i8, twice
constexpr int64_t kQuadBytes = 4;
inline void store_quad(std::byte* to, const int8_t* s) { memcpy(to, s, kQuadBytes); }
inline Quads load_quads(const std::byte* p) {
  Quads r;
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) r.v[i] = vld1q_u8(reinterpret_cast<const uint8_t*>(p) + 16 * i);
  return r;
}
inline SignedQuads broadcast_quad(const std::byte* p) {
  return vreinterpret_s8_s32(vld1_dup_s32(reinterpret_cast<const int32_t*>(p)));
}
inline I32x16 dot4(const Quads& u, SignedQuads s, I32x16 y) {
  QUIRE_QUARTERS(I32x16, vusdotq_lane_s32(y.v[i], u.v[i], s, 0));
}
#else
// SDOT takes signed bytes: u - 128, whose product with s lacks 128 times the sum of s.
struct Quads {
  int8x16_t v[4];
};
struct SignedQuads {
  int8x8_t four;
  int32x4_t missing;
};
constexpr int64_t kQuadBytes = 8;
inline void store_quad(std::byte* to, const int8_t* s) {
  const int32_t missing = 128 * (s[0] + s[1] + s[2] + s[3]);
  memcpy(to, s, 4);
  memcpy(to + 4, &missing, sizeof missing);
}
inline Quads load_quads(const std::byte* p) {
  Quads r;
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    r.v[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p) + 16 * i), vdupq_n_u8(128)));
  }
  return r;
}
inline SignedQuads broadcast_quad(const std::byte* p) {
  return {vreinterpret_s8_s32(vld1_s32(reinterpret_cast<const int32_t*>(p))),
          vld1q_dup_s32(reinterpret_cast<const int32_t*>(p + 4))};
}
inline I32x16 dot4(const Quads& u, SignedQuads s, I32x16 y) {
  QUIRE_QUARTERS(I32x16, vdotq_lane_s32(vaddq_s32(y.v[i], s.missing), u.v[i], s.four, 0));
}
#endif

// The first i8 of 16 pairs as int16, and the second ones.
struct Shorts {
  int16x8_t first[2], second[2];
};
using BroadcastShorts = int16x4_t;  // two i16, twice
inline Shorts load_shorts(const std::byte* p) {
  const int8x16x2_t both = vld2q_s8(reinterpret_cast<const int8_t*>(p));
  return {{vmovl_s8(vget_low_s8(both.val[0])), vmovl_high_s8(both.val[0])},
          {vmovl_s8(vget_low_s8(both.val[1])), vmovl_high_s8(both.val[1])}};
}
inline BroadcastShorts broadcast_shorts(const std::byte* p) {
  return vreinterpret_s16_s32(vld1_dup_s32(reinterpret_cast<const int32_t*>(p)));
}
inline void store_shorts(std::byte* p, I32x16 a) {
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) vst1_s16(reinterpret_cast<int16_t*>(p) + 4 * i, vqmovn_s32(a.v[i]));
}
inline I32x16 dot2(const Shorts& a, BroadcastShorts b, I32x16 y) {
  QUIRE_UNROLL for (int i = 0; i < 2; ++i) {
    const int16x4_t first = vget_low_s16(a.first[i]), second = vget_low_s16(a.second[i]);
    y.v[2 * i] = vmlal_lane_s16(vmlal_lane_s16(y.v[2 * i], first, b, 0), second, b, 1);
    y.v[2 * i + 1] = vmlal_high_lane_s16(vmlal_high_lane_s16(y.v[2 * i + 1], a.first[i], b, 0), a.second[i], b, 1);
  }
  return y;
}

#else

struct Quads {
  uint8_t v[4 * kLanes];
};
struct Shorts {
  int16_t v[2 * kLanes];
};
QUIRE_OUTLINE Quads load_quads(const std::byte* p) {
  Quads r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
QUIRE_OUTLINE Quads broadcast_quad(const std::byte* p) {
  Quads r;
  for (int i = 0; i < kLanes; ++i) memcpy(r.v + 4 * i, p, 4);
  return r;
}
QUIRE_OUTLINE Shorts load_shorts(const std::byte* p) {
  int8_t narrow[2 * kLanes];
  memcpy(narrow, p, sizeof narrow);
  Shorts r;
  for (int i = 0; i < 2 * kLanes; ++i) r.v[i] = narrow[i];
  return r;
}
QUIRE_OUTLINE Shorts broadcast_shorts(const std::byte* p) {
  Shorts r;
  for (int i = 0; i < kLanes; ++i) memcpy(r.v + 2 * i, p, 4);
  return r;
}
QUIRE_OUTLINE void store_shorts(std::byte* p, I32x16 a) {
  int32_t wide[kLanes];
  int16_t narrow[kLanes];
  store(wide, a);
  for (int i = 0; i < kLanes; ++i) narrow[i] = static_cast<int16_t>(wide[i]);
  memcpy(p, narrow, sizeof narrow);
}
QUIRE_OUTLINE I32x16 dot4(const Quads& u, const Quads& s, I32x16 y) {
  int32_t sums[kLanes];
  store(sums, y);
  for (int lane = 0; lane < kLanes; ++lane) {
    QUIRE_UNROLL for (int i = 4 * lane; i < 4 * lane + 4; ++i) sums[lane] += u.v[i] * static_cast<int8_t>(s.v[i]);
  }
  return load(sums);
}
QUIRE_OUTLINE I32x16 dot2(const Shorts& a, const Shorts& b, I32x16 y) {
  int32_t sums[kLanes];
  store(sums, y);
  for (int i = 0; i < kLanes; ++i) sums[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return load(sums);
}

#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !(defined(__AVX2__) || defined(QUIRE_NEON))
// Four i8 as dot4 multiplies them, and as they are stored to be broadcast.
using SignedQuads = Quads;
constexpr int64_t kQuadBytes = 4;
inline void store_quad(std::byte* to, const int8_t* s) { memcpy(to, s, kQuadBytes); }
#endif
#if !defined(QUIRE_NEON)
using BroadcastShorts = Shorts;
#endif

}  // namespace
}  // namespace quire
