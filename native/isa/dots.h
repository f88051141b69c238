// Exact dot products of a block: unsigned weights of 4 or 8 bits with signed bytes, sixteen outputs at a time.
//
// NibbleDots and ByteDots have the same face: `load` takes the next kInputs inputs of a tile, `add` adds their products
// with the activations from x on, `total` ends a block. The sums are integers and fit, so that any order gives the same
// result. WideDots is NibbleDots for numbers of five and six bits: with_fifth and with_upper add the other bits to
// chunk `chunk` of a block.
#pragma once
#include "isa/simd.h"

namespace quire {
namespace {

// The four bytes at p in each lane, as the bits of an int32.
inline int32_t four_bytes(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return four;
}

#if defined(__AVX512VNNI__)

struct NibbleDots {
  static constexpr int kInputs = 8;  // of each output
  struct Weights {
    __m512i low, high;
  };
  using Sums = I32x16;
  static Weights load(const uint8_t* p) {
    const __m512i pairs = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(pairs, mask), _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask)};
  }
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    sums.v = _mm512_dpbusd_epi32(sums.v, w.low, _mm512_set1_epi32(four_bytes(x)));
    return {_mm512_dpbusd_epi32(sums.v, w.high, _mm512_set1_epi32(four_bytes(x + 4)))};
  }
  static I32x16 total(Sums sums) { return sums; }  // sum of u * x
};

struct ByteDots {
  static constexpr int kInputs = 4;
  using Weights = __m512i;
  using Sums = I32x16;
  static Weights load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, Weights w, const int8_t* x) {
    return {_mm512_dpbusd_epi32(sums.v, w, _mm512_set1_epi32(four_bytes(x)))};
  }
  // Sum of (u - 128) * x, given the sum of x.
  static I32x16 total(Sums sums, int32_t sum_of_x) { return sums - shift_left<7>(broadcast(sum_of_x)); }
};

struct WideDots : NibbleDots {
  // Bits of each byte moved up by `count` places, or down if it is negative.
  static __m512i moved(__m512i bits, int count, int mask) {
    const __m512i there = count < 0 ? _mm512_srli_epi32(bits, -count) : _mm512_slli_epi32(bits, count);
    return _mm512_and_si512(there, _mm512_set1_epi8(static_cast<char>(mask)));
  }
  static Weights with(const Weights& w, const uint8_t* p, int low, int high, int mask) {
    const __m512i bits = _mm512_loadu_si512(p);
    return {_mm512_or_si512(w.low, moved(bits, low, mask)), _mm512_or_si512(w.high, moved(bits, high, mask))};
  }
  static Weights with_fifth(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p, 4 - 2 * chunk, 3 - 2 * chunk, 16);
  }
  static Weights with_upper(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p + chunk / 2 * 64, 4 - 4 * (chunk % 2), 2 - 4 * (chunk % 2), 48);
  }
};

inline F32x16 widen_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline F32x16 widen_i8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

#elif defined(__AVX2__)

// GCC 12 computes all products of a block before it adds them, and spills them: 86 GMAC/s instead of 124.
inline __m256i in_register(__m256i value) {
  asm("" : "+x"(value));
  return value;
}

// Nibbles and WideNibbles unpack weights; how they are multiplied differs.
struct Nibbles {
  static constexpr int kInputs = 8;
  struct Half {
    __m256i low, high;
  };
  struct Weights {
    Half lo, hi;  // lanes 0 … 7 and 8 … 15
  };
  static Half load_half(const uint8_t* p) {
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(pairs, mask), _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask)};
  }
  static Weights load(const uint8_t* p) { return {load_half(p), load_half(p + 32)}; }
};

struct WideNibbles : Nibbles {
  static __m256i moved(__m256i bits, int count, int mask) {
    const __m256i there = count < 0 ? _mm256_srli_epi32(bits, -count) : _mm256_slli_epi32(bits, count);
    return _mm256_and_si256(there, _mm256_set1_epi8(static_cast<char>(mask)));
  }
  static Half with_half(const Half& w, const uint8_t* p, int low, int high, int mask) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)p);
    return {_mm256_or_si256(w.low, moved(bits, low, mask)), _mm256_or_si256(w.high, moved(bits, high, mask))};
  }
  static Weights with(const Weights& w, const uint8_t* p, int low, int high, int mask) {
    return {with_half(w.lo, p, low, high, mask), with_half(w.hi, p + 32, low, high, mask)};
  }
  static Weights with_fifth(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p, 4 - 2 * chunk, 3 - 2 * chunk, 16);
  }
  static Weights with_upper(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p + chunk / 2 * 64, 4 - 4 * (chunk % 2), 2 - 4 * (chunk % 2), 48);
  }
};

#if defined(__AVXVNNI__)

struct NibbleDots : Nibbles {
  using Sums = I32x16;
  static Sums zero() { return zero_i(); }
  static __m256i add(__m256i sums, const Half& w, __m256i a, __m256i b) {
    return in_register(_mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sums, w.low, a), w.high, b));
  }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i a = _mm256_set1_epi32(four_bytes(x)), b = _mm256_set1_epi32(four_bytes(x + 4));
    return {add(sums.lo, w.lo, a, b), add(sums.hi, w.hi, a, b)};
  }
  static I32x16 total(Sums sums) { return sums; }
};

struct ByteDots {
  static constexpr int kInputs = 4;
  struct Weights {
    __m256i lo, hi;
  };
  using Sums = I32x16;
  static Weights load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
  }
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i four = _mm256_set1_epi32(four_bytes(x));
    return {in_register(_mm256_dpbusd_avx_epi32(sums.lo, w.lo, four)),
            in_register(_mm256_dpbusd_avx_epi32(sums.hi, w.hi, four))};
  }
  static I32x16 total(Sums sums, int32_t sum_of_x) { return sums - shift_left<7>(broadcast(sum_of_x)); }
};

struct WideDots : WideNibbles {
  using Sums = I32x16;
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) { return NibbleDots::add(sums, w, x); }
  static I32x16 total(Sums sums) { return sums; }
};

#else

// Sums of two products as int16. 32 inputs make 16 products of at most 15 * 127 for each of them: they fit.
struct NibbleDots : Nibbles {
  struct Sums {
    __m256i lo, hi;
  };
  static Sums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static __m256i products(const Half& w, __m256i a, __m256i b) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(w.low, a), _mm256_maddubs_epi16(w.high, b));
  }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i a = _mm256_set1_epi32(four_bytes(x)), b = _mm256_set1_epi32(four_bytes(x + 4));
    sums.lo = in_register(_mm256_add_epi16(sums.lo, products(w.lo, a, b)));
    sums.hi = in_register(_mm256_add_epi16(sums.hi, products(w.hi, a, b)));
    return sums;
  }
  static I32x16 total(Sums sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sums.lo, ones), _mm256_madd_epi16(sums.hi, ones)};
  }
};

// |w| is unsigned and x takes w's sign: two products are at most 2 * 128 * 127, which fits int16. x is never -128.
struct ByteDots {
  static constexpr int kInputs = 4;
  struct Weights {
    __m256i lo, hi;  // u - 128
  };
  using Sums = I32x16;
  static Weights load(const uint8_t* p) {
    const __m256i centre = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), centre),
            _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + 32)), centre)};
  }
  static __m256i products(__m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i four = _mm256_set1_epi32(four_bytes(x));
    return {in_register(_mm256_add_epi32(sums.lo, products(w.lo, four))),
            in_register(_mm256_add_epi32(sums.hi, products(w.hi, four)))};
  }
  static I32x16 total(Sums sums, int32_t) { return sums; }
};

// Four products of at most 63 * 127 fit int16.
struct WideDots : WideNibbles {
  using Sums = I32x16;
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i a = _mm256_set1_epi32(four_bytes(x)), b = _mm256_set1_epi32(four_bytes(x + 4));
    const __m256i ones = _mm256_set1_epi16(1);
    return {in_register(_mm256_add_epi32(sums.lo, _mm256_madd_epi16(NibbleDots::products(w.lo, a, b), ones))),
            in_register(_mm256_add_epi32(sums.hi, _mm256_madd_epi16(NibbleDots::products(w.hi, a, b), ones)))};
  }
  static I32x16 total(Sums sums) { return sums; }
};

#endif

inline F32x16 widen_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return to_float(I32x16{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline F32x16 widen_i8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return to_float(I32x16{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

#elif defined(QUIRE_NEON)

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_ROW_PAIRS 1
#endif

// Weights of four outputs in each register, those of inputs 0 to 3 apart from those of 4 to 7. All are signed bytes:
// what SDOT multiplies.
struct SignedDots {
  static constexpr int kInputs = 8;
  struct Weights {
    int8x16_t low[4], high[4];
  };
  using Sums = I32x16;
  static Sums zero() { return zero_i(); }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const int8x8_t eight = vld1_s8(x);
    QUIRE_QUARTERS(I32x16, vdotq_lane_s32(vdotq_lane_s32(sums.v[i], w.low[i], eight, 0), w.high[i], eight, 1));
  }
  static I32x16 total(Sums sums) { return sums; }

#if defined(QUIRE_ROW_PAIRS)
  // SMMLA multiplies eight inputs of two outputs with two rows: twice the products of SDOT. Outputs 2 i and 2 i + 1 are
  // in register i, their sums with the first and with the second row side by side.
  struct PairWeights {
    int8x16_t v[8];
  };
  struct PairSums {
    int32x4_t v[8];
  };
  static PairSums no_pair() {
    PairSums r;
    QUIRE_UNROLL for (int i = 0; i < 8; ++i) r.v[i] = vdupq_n_s32(0);
    return r;
  }
  static PairWeights paired(const Weights& w) {
    PairWeights r;
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
      const int32x4_t low = vreinterpretq_s32_s8(w.low[i]), high = vreinterpretq_s32_s8(w.high[i]);
      r.v[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
      r.v[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
    }
    return r;
  }
  static void add_pair(PairSums& sums, const PairWeights& w, const int8_t* first, const int8_t* second) {
    const int8x16_t both = vcombine_s8(vld1_s8(first), vld1_s8(second));
    QUIRE_UNROLL for (int i = 0; i < 8; ++i) sums.v[i] = vmmlaq_s32(sums.v[i], w.v[i], both);
  }
  static I32x16 first_of(const PairSums& sums) { QUIRE_QUARTERS(I32x16, vuzp1q_s32(sums.v[2 * i], sums.v[2 * i + 1])); }
  static I32x16 second_of(const PairSums& sums) {
    QUIRE_QUARTERS(I32x16, vuzp2q_s32(sums.v[2 * i], sums.v[2 * i + 1]));
  }
#endif
};

struct NibbleDots : SignedDots {
  static Weights load(const uint8_t* p) {
    Weights w;
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
      const uint8x16_t pairs = vld1q_u8(p + 16 * i);
      w.low[i] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
      w.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
    }
    return w;
  }
};

struct ByteDots : SignedDots {
  static Weights load(const uint8_t* p) {
    Weights w;
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
      w.low[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
      w.high[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 64 + 16 * i), vdupq_n_u8(128)));
    }
    return w;
  }
  static I32x16 total(Sums sums, int32_t) { return sums; }
};

struct WideDots : NibbleDots {
  // Bits of each byte moved up by `count` places, or down if it is negative.
  static int8x16_t moved(uint8x16_t bits, int count, int mask) {
    const uint8x16_t there = count < 0 ? bits >> -count : bits << count;
    return vreinterpretq_s8_u8(vandq_u8(there, vdupq_n_u8(static_cast<uint8_t>(mask))));
  }
  static Weights with(Weights w, const uint8_t* p, int low, int high, int mask) {
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
      const uint8x16_t bits = vld1q_u8(p + 16 * i);
      w.low[i] = vorrq_s8(w.low[i], moved(bits, low, mask));
      w.high[i] = vorrq_s8(w.high[i], moved(bits, high, mask));
    }
    return w;
  }
  static Weights with_fifth(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p, 4 - 2 * chunk, 3 - 2 * chunk, 16);
  }
  static Weights with_upper(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p + chunk / 2 * 64, 4 - 4 * (chunk % 2), 2 - 4 * (chunk % 2), 48);
  }
};

inline F32x16 widen_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t a = vmovl_u8(vget_low_u8(bytes)), b = vmovl_high_u8(bytes);
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(a))), vcvtq_f32_u32(vmovl_high_u16(a)),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(b))), vcvtq_f32_u32(vmovl_high_u16(b))}};
}
inline F32x16 widen_i8(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t a = vmovl_s8(vget_low_s8(bytes)), b = vmovl_high_s8(bytes);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_high_s16(a)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_high_s16(b))}};
}

#else

struct NibbleDots {
  static constexpr int kInputs = 8;
  struct Weights {
    uint8_t low[64], high[64];
  };
  using Sums = I32x16;
  [[gnu::noinline]] static Weights load(const uint8_t* p) {
    Weights w;
    for (int i = 0; i < 64; ++i) {
      w.low[i] = p[i] & 15;
      w.high[i] = p[i] >> 4;
    }
    return w;
  }
  static Sums zero() { return zero_i(); }
  [[gnu::noinline]] static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    int32_t total[kLanes];
    store(total, sums);
    for (int lane = 0; lane < kLanes; ++lane) {
      QUIRE_UNROLL for (int i = 0; i < 4; ++i) total[lane] +=
          w.low[lane * 4 + i] * x[i] + w.high[lane * 4 + i] * x[4 + i];
    }
    return quire::load(total);
  }
  static I32x16 total(Sums sums) { return sums; }
};

struct ByteDots {
  static constexpr int kInputs = 4;
  using Weights = const uint8_t*;
  using Sums = I32x16;
  static Weights load(const uint8_t* p) { return p; }
  static Sums zero() { return zero_i(); }
  [[gnu::noinline]] static Sums add(Sums sums, Weights w, const int8_t* x) {
    int32_t total[kLanes];
    store(total, sums);
    for (int lane = 0; lane < kLanes; ++lane) {
      QUIRE_UNROLL for (int i = 0; i < 4; ++i) total[lane] += (w[lane * 4 + i] - 128) * x[i];
    }
    return quire::load(total);
  }
  static I32x16 total(Sums sums, int32_t) { return sums; }
};

struct WideDots : NibbleDots {
  [[gnu::noinline]] static Weights with(Weights w, const uint8_t* p, int low, int high, int mask) {
    for (int i = 0; i < 64; ++i) {
      w.low[i] |= static_cast<uint8_t>(p[i] << 4 >> low & mask);
      w.high[i] |= static_cast<uint8_t>(p[i] << 4 >> high & mask);
    }
    return w;
  }
  static Weights with_fifth(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p, 2 * chunk, 2 * chunk + 1, 16);
  }
  static Weights with_upper(const Weights& w, const uint8_t* p, int chunk) {
    return with(w, p + chunk / 2 * 64, 4 * (chunk % 2), 4 * (chunk % 2) + 2, 48);
  }
};

QUIRE_OUTLINE F32x16 widen_u8(const uint8_t* p) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(p[i]);
  return load(wide);
}
QUIRE_OUTLINE F32x16 widen_i8(const uint8_t* p) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return load(wide);
}

#endif

}  // namespace
}  // namespace quire
