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

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
// Four i8 as dot4 multiplies them, and as they are stored to be broadcast.
using SignedQuads = Quads;
constexpr int64_t kQuadBytes = 4;
inline void store_quad(std::byte* to, const int8_t* s) { memcpy(to, s, kQuadBytes); }
#endif

}  // namespace
}  // namespace quire
