// Sixteen lanes of fp32 or int32: the one vector type of all ops, as what this translation unit's flags offer.
//
// Lanes, not registers, fix the order of every sum, and fused multiply-add is always explicit (contraction is off):
// each instruction set gives the same bits. Everything here is in an unnamed namespace and nothing of the standard
// library's templates is used: an inline function shared between translation units would be linked once, perhaps with
// instructions that this processor lacks.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(QUIRE_NEON)
#include <arm_neon.h>
#endif

// Before a loop of constant length whose counter indexes an array that must live in registers.
#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 64")
#endif

namespace quire {
namespace {

constexpr int kLanes = 16;

// Into L2, so that what is being read stays in L1. Any address will do.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// Into L1: what is read next.
inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
// Into L1, taken from other cores.
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

#if defined(__AVX512F__)

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
inline F32x16 zero() { return {_mm512_setzero_ps()}; }
inline F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }                   // b where a or b is NaN
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 widen_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F32x16 widen_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// a < b ? x : y in each lane; y where a or b is NaN.
inline F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline I32x16 zero_i() { return {_mm512_setzero_si512()}; }
inline I32x16 broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32x16 round_to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even
inline I32x16 bits_of(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
inline F32x16 float_of_bits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
template <int kBits>
inline I32x16 shift_left(I32x16 a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}

#elif defined(__AVX2__)

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};
inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 abs(F32x16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline __m256 widen8_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F32x16 widen_bf16(const uint16_t* p) { return {widen8_bf16(p), widen8_bf16(p + 8)}; }
inline F32x16 widen_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline I32x16 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32x16 broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32x16 load(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline void store(int32_t* p, I32x16 a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 round_to_int(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline I32x16 bits_of(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F32x16 float_of_bits(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
template <int kBits>
inline I32x16 shift_left(I32x16 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}

#else

// Four registers of 16 bytes: NEON, or what every processor has. Of the latter, functions that take a call or branches
// for each lane are not inlined: that, and loops over single lanes, made it take twice as long to compile as any other.
#define QUIRE_OUTLINE [[gnu::noinline]] inline
typedef float F32x4 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
struct F32x16 {
  F32x4 v[4];
};
struct I32x16 {
  I32x4 v[4];
};
#define QUIRE_QUARTERS(Type, expression)                        \
  Type r;                                                       \
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) r.v[i] = expression; \
  return r
#define QUIRE_LANES(Type, expression)                                \
  Type r;                                                            \
  for (int i = 0; i < kLanes; ++i) r.v[i / 4][i % 4] = (expression); \
  return r
inline float lane(const F32x16& a, int i) { return a.v[i / 4][i % 4]; }
inline int32_t lane(const I32x16& a, int i) { return a.v[i / 4][i % 4]; }
inline F32x16 broadcast(float x) { QUIRE_QUARTERS(F32x16, (F32x4{x, x, x, x})); }
inline F32x16 zero() { return broadcast(0.0f); }
#if defined(QUIRE_NEON)
inline F32x16 load(const float* p) { QUIRE_QUARTERS(F32x16, vld1q_f32(p + 4 * i)); }
inline I32x16 load(const int32_t* p) { QUIRE_QUARTERS(I32x16, vld1q_s32(p + 4 * i)); }
inline void store(float* p, F32x16 a) { QUIRE_UNROLL for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
inline void store(int32_t* p, I32x16 a) { QUIRE_UNROLL for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]); }
#else
inline F32x16 load(const float* p) {
  F32x16 r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline I32x16 load(const int32_t* p) {
  I32x16 r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, F32x16 a) { memcpy(p, &a, sizeof a); }
inline void store(int32_t* p, I32x16 a) { memcpy(p, &a, sizeof a); }
#endif
inline F32x16 operator+(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] + b.v[i]); }
inline F32x16 operator-(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] - b.v[i]); }
inline F32x16 operator*(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] * b.v[i]); }
inline F32x16 operator/(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] / b.v[i]); }
#if defined(QUIRE_NEON)
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { QUIRE_QUARTERS(F32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
#else
#if defined(__FP_FAST_FMAF)
inline
#else
QUIRE_OUTLINE
#endif
    F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  QUIRE_LANES(F32x16, __builtin_fmaf(lane(a, i), lane(b, i), lane(c, i)));
}
#endif
inline F32x16 max(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F32x16 min(F32x16 a, F32x16 b) { QUIRE_QUARTERS(F32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F32x16 abs(F32x16 a) { QUIRE_QUARTERS(F32x16, (F32x4)((I32x4)a.v[i] & 0x7fffffff)); }
inline F32x16 select_less(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  QUIRE_QUARTERS(F32x16, a.v[i] < b.v[i] ? x.v[i] : y.v[i]);
}
#if defined(QUIRE_NEON)
inline F32x16 widen_bf16(const uint16_t* p) {
  QUIRE_QUARTERS(F32x16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
inline F32x16 widen_f16(const uint16_t* p) {
  QUIRE_QUARTERS(F32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
#else
inline float widen1_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
inline float widen1_f16(uint16_t bits) {
  const uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    const uint32_t wide =
        exponent == 31 ? 0x7f800000u | (fraction << 13) : ((exponent + 112u) << 23) | (fraction << 13);
    memcpy(&value, &wide, sizeof value);
  }
  return (bits & 0x8000u) ? -value : value;
}
QUIRE_OUTLINE F32x16 widen_bf16(const uint16_t* p) { QUIRE_LANES(F32x16, widen1_bf16(p[i])); }
QUIRE_OUTLINE F32x16 widen_f16(const uint16_t* p) { QUIRE_LANES(F32x16, widen1_f16(p[i])); }
#endif
inline I32x16 broadcast(int32_t x) { QUIRE_QUARTERS(I32x16, (I32x4{x, x, x, x})); }
inline I32x16 zero_i() { return broadcast(int32_t{0}); }
// Unsigned: sums may wrap.
inline I32x16 operator+(I32x16 a, I32x16 b) { QUIRE_QUARTERS(I32x16, (I32x4)((U32x4)a.v[i] + (U32x4)b.v[i])); }
inline I32x16 operator-(I32x16 a, I32x16 b) { QUIRE_QUARTERS(I32x16, (I32x4)((U32x4)a.v[i] - (U32x4)b.v[i])); }
inline F32x16 to_float(I32x16 a) { QUIRE_QUARTERS(F32x16, __builtin_convertvector(a.v[i], F32x4)); }
// As AVX does: nearest, ties to even, and INT_MIN for NaN and for what does not fit.
#if defined(QUIRE_NEON)
inline I32x16 round_to_int(F32x16 a) {
  const uint32x4_t least = vdupq_n_u32(0x80000000u);
  QUIRE_QUARTERS(I32x16, (I32x4)vbslq_u32(vcltq_f32(a.v[i], vdupq_n_f32(2147483648.0f)),
                                          vreinterpretq_u32_s32(vcvtnq_s32_f32(a.v[i])), least));
}
#else
inline int32_t round1_to_int(float x) {
  if (!(x >= -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<int32_t>(__builtin_nearbyintf(x));
}
QUIRE_OUTLINE I32x16 round_to_int(const F32x16& a) { QUIRE_LANES(I32x16, round1_to_int(lane(a, i))); }
#endif
inline I32x16 bits_of(F32x16 a) { QUIRE_QUARTERS(I32x16, (I32x4)a.v[i]); }
inline F32x16 float_of_bits(I32x16 a) { QUIRE_QUARTERS(F32x16, (F32x4)a.v[i]); }
template <int kBits>
inline I32x16 shift_left(I32x16 a) {
  QUIRE_QUARTERS(I32x16, (I32x4)((U32x4)a.v[i] << kBits));
}

#endif

// The same value, on AVX2 in registers of its own from here on: GCC 12 otherwise renames sums that a loop adds to until
// it spills some of them, and each turn waits for memory. Attention of one decode to 2,048 positions in cache, with
// three heads for each of keys, took 38 % longer so (bf16, Zen 3).
template <typename Vector>
Vector in_registers(Vector a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(a.lo), "+x"(a.hi));
#endif
  return a;
}

// Sum of the lanes in a fixed tree: halves, then quarters, …
#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 low_half(F32x16 a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(F32x16 a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
#else
inline __m256 low_half(F32x16 a) { return a.lo; }
inline __m256 high_half(F32x16 a) { return a.hi; }
#endif
inline float sum(F32x16 a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(F32x16 a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// See below; sums of four vectors take less than half the instructions of four single ones.
inline void sum_four(const F32x16* a, float* out) {
  const auto two_quarters = [](F32x16 a, F32x16 b) {  // halves of each added, then quarters: of a, then of b
    const __m256 x = _mm256_add_ps(low_half(a), high_half(a)), y = _mm256_add_ps(low_half(b), high_half(b));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const __m256 x = two_quarters(a[0], a[2]), y = two_quarters(a[1], a[3]);
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xdd));
  _mm_storeu_ps(out, _mm_movelh_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#elif defined(QUIRE_NEON)
inline F32x4 quarters_added(F32x16 a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float sum(F32x16 a) {
  const float32x4_t four = quarters_added(a);
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
inline F32x4 larger(F32x4 a, F32x4 b) { return a > b ? a : b; }
inline float largest(F32x16 a) {
  const F32x4 four = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  const F32x4 two = larger(four, vextq_f32(four, four, 2));
  return two[0] > two[1] ? two[0] : two[1];
}
inline void sum_four(const F32x16* a, float* out) {
  const auto two_halves = [](float32x4_t a, float32x4_t b) {  // of each: the first half plus the second
    const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
  };
  const float32x4_t x = two_halves(quarters_added(a[0]), quarters_added(a[1]));
  const float32x4_t y = two_halves(quarters_added(a[2]), quarters_added(a[3]));
  vst1q_f32(out, vpaddq_f32(x, y));
}
#else
inline float sum(const F32x16& a) {
  const F32x4 four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float largest(const F32x16& a) {
  float v[kLanes];
  store(v, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  }
  return v[0];
}
#endif

// out[i] = sum(a[i])
template <int N>
[[gnu::always_inline]] inline void sum_each(const F32x16 (&a)[N], float* out) {
  int i = 0;
#if defined(__AVX2__) || defined(QUIRE_NEON)
  QUIRE_UNROLL for (; i + 4 <= N; i += 4) sum_four(a + i, out + i);
#endif
  QUIRE_UNROLL for (; i < N; ++i) out[i] = sum(a[i]);
}

// fp32 to bf16: nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// store_bf16: sixteen such. store_bytes: the low bytes of 32 lanes; returns the sums of the first 16 and of all of them
// as signed bytes.
// any_above: whether some lane is above `limit` or NaN.
struct ByteSums {
  int32_t first, all;
};
#if defined(__AVX2__)
inline int32_t sum_of_halves(__m128i two) {
  return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
}
inline ByteSums sums_of_bytes(__m256i bytes) {
  const __m256i above = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));  // 128 more, unsigned
  const __m256i four = _mm256_sad_epu8(above, _mm256_setzero_si256());
  const int32_t first = sum_of_halves(_mm256_castsi256_si128(four)) - 16 * 128;
  return {first, first + sum_of_halves(_mm256_extracti128_si256(four, 1)) - 16 * 128};
}
#endif
#if defined(__AVX512F__)
inline void store_bf16(uint16_t* p, F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(bits, 16);
  const __m512i half = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(result));
}
inline ByteSums store_bytes(int8_t* p, I32x16 a, I32x16 b) {
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b.v), _mm512_cvtepi32_epi8(a.v));
  _mm256_storeu_si256((__m256i*)p, bytes);
  return sums_of_bytes(bytes);
}
inline bool any_above(F32x16 a, float limit) {
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_NLE_UQ) != 0;
}
#elif defined(__AVX2__)
inline __m256i to8_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  const __m256i half = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
inline void store_bf16(uint16_t* p, F32x16 a) {
  const __m256i mixed = _mm256_packus_epi32(to8_bf16(a.lo), to8_bf16(a.hi));  // quarters 0, 2, 1, 3
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline ByteSums store_bytes(int8_t* p, I32x16 a, I32x16 b) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i first = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  const __m256i second = _mm256_packus_epi32(_mm256_and_si256(b.lo, low), _mm256_and_si256(b.hi, low));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  _mm256_storeu_si256((__m256i*)p, bytes);
  return sums_of_bytes(bytes);
}
inline bool any_above(F32x16 a, float limit) {
  const __m256 limits = _mm256_set1_ps(limit);
  const __m256 lo = _mm256_cmp_ps(a.lo, limits, _CMP_NLE_UQ), hi = _mm256_cmp_ps(a.hi, limits, _CMP_NLE_UQ);
  return _mm256_movemask_ps(_mm256_or_ps(lo, hi)) != 0;
}
#elif defined(QUIRE_NEON)
inline void store_bf16(uint16_t* p, F32x16 a) {
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)));
    const uint16x4_t quiet = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
    vst1_u16(p + 4 * i, vbsl_u16(vmovn_u32(vceqq_f32(a.v[i], a.v[i])), rounded, quiet));
  }
}
// The low bytes of 16 lanes.
inline int8x16_t low_bytes(I32x16 a) {
  const auto halves = [](int32x4_t a, int32x4_t b) {
    return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
  };
  return vuzp1q_s8(halves(a.v[0], a.v[1]), halves(a.v[2], a.v[3]));
}
inline ByteSums store_bytes(int8_t* p, I32x16 a, I32x16 b) {
  const int8x16_t first = low_bytes(a), second = low_bytes(b);
  vst1q_s8(p, first);
  vst1q_s8(p + kLanes, second);
  const int32_t sum = vaddlvq_s8(first);
  return {sum, sum + vaddlvq_s8(second)};
}
inline bool any_above(F32x16 a, float limit) {
  uint32x4_t all = vdupq_n_u32(~0u);
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) all = vandq_u32(all, vcleq_f32(a.v[i], vdupq_n_f32(limit)));
  return vminvq_u32(all) == 0;
}
#else
QUIRE_OUTLINE void store_bf16(uint16_t* p, F32x16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(lane(a, i));
}
QUIRE_OUTLINE ByteSums store_bytes(int8_t* p, I32x16 a, I32x16 b) {
  ByteSums sums{};
  for (int i = 0; i < kLanes; ++i) {
    p[i] = static_cast<int8_t>(lane(a, i));
    p[i + kLanes] = static_cast<int8_t>(lane(b, i));
    sums.first += p[i];
    sums.all += p[i] + p[i + kLanes];
  }
  return sums;
}
QUIRE_OUTLINE bool any_above(F32x16 a, float limit) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= !(lane(a, i) <= limit);
  return any;
}
#endif

}  // namespace
}  // namespace quire
