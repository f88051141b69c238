// Exact dot products of 4-bit codes with signed bytes: a code stands for one of a table's sixteen signed integers.
//
// CodebookDots has the face of dots.h; its sums begin with `start`. Codes are looked up as unsigned bytes, integers
// plus kAdded, which are then multiplied like any: `start` takes back what that adds.
//
// On Zen 3 (2 threads, AVX2, 12288 x 2048) one row of iq4xs, iq4nl, mxfp4 and nvfp4 reads at 94, 88, 88 and 76 % of the
// speed of plain reads, q8 at 95. Products of 64 rows run at 115, 116, 170 and 143 GMAC/s, q8 at 119: iq4 takes q8's
// instructions and looks up its codes, nvfp4 scales twice in a block.
#pragma once
#include "isa/dots.h"

namespace quire {
namespace {

// e2m1: twice the floats of a sign, two exponent bits and one fraction bit (OCP MX 1.0). iq4: of IQ4_NL and IQ4_XS
// (ggml-common.h of ggml).
enum class Codebook { e2m1, iq4 };

template <Codebook kBook>
struct Codes;
template <>
struct Codes<Codebook::e2m1> {
  static constexpr int8_t kIntegers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static constexpr int32_t kAdded = 12;
};
template <>
struct Codes<Codebook::iq4> {
  static constexpr int8_t kIntegers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static constexpr int32_t kAdded = 128;
};

// look_up: entry c of `table` for each code c. powers_of_two: 2^(p[i] - 127) in each lane, and 0 where p[i] is 0.
#if defined(__AVX512VNNI__)

inline WideDots::Weights look_up(const WideDots::Weights& codes, const uint8_t* table) {
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(entries, codes.low), _mm512_shuffle_epi8(entries, codes.high)};
}
inline F32x16 powers_of_two(const uint8_t* p) {
  return float_of_bits(shift_left<23>(I32x16{_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}));
}

#elif defined(__AVX2__)

inline WideDots::Weights look_up(const WideDots::Weights& codes, const uint8_t* table) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {{_mm256_shuffle_epi8(entries, codes.lo.low), _mm256_shuffle_epi8(entries, codes.lo.high)},
          {_mm256_shuffle_epi8(entries, codes.hi.low), _mm256_shuffle_epi8(entries, codes.hi.high)}};
}
inline F32x16 powers_of_two(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  const I32x16 exponents{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  return float_of_bits(shift_left<23>(exponents));
}

#elif defined(QUIRE_NEON)

inline WideDots::Weights look_up(const WideDots::Weights& codes, const int8_t* table) {
  const int8x16_t integers = vld1q_s8(table);
  WideDots::Weights entries;
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    entries.low[i] = vqtbl1q_s8(integers, vreinterpretq_u8_s8(codes.low[i]));
    entries.high[i] = vqtbl1q_s8(integers, vreinterpretq_u8_s8(codes.high[i]));
  }
  return entries;
}
inline F32x16 powers_of_two(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t a = vmovl_u8(vget_low_u8(bytes)), b = vmovl_high_u8(bytes);
  const I32x16 exponents{{(I32x4)vmovl_u16(vget_low_u16(a)), (I32x4)vmovl_high_u16(a),
                          (I32x4)vmovl_u16(vget_low_u16(b)), (I32x4)vmovl_high_u16(b)}};
  return float_of_bits(shift_left<23>(exponents));
}

#else

inline WideDots::Weights look_up(const WideDots::Weights& codes, const uint8_t* table) {
  WideDots::Weights entries;
  for (int i = 0; i < 64; ++i) {
    entries.low[i] = table[codes.low[i]];
    entries.high[i] = table[codes.high[i]];
  }
  return entries;
}
inline F32x16 powers_of_two(const uint8_t* p) {
  int32_t exponents[kLanes];
  for (int i = 0; i < kLanes; ++i) exponents[i] = p[i];
  return float_of_bits(shift_left<23>(load(exponents)));
}

#endif

#if defined(QUIRE_NEON)

// Signed bytes are multiplied as they are.
template <Codebook kBook>
struct CodebookDots : WideDots {
  static Weights load(const uint8_t* p) { return look_up(WideDots::load(p), Codes<kBook>::kIntegers); }
  static Sums start(int32_t) { return zero_i(); }
};

#else

template <Codebook kBook>
struct UnsignedTable {
  uint8_t entries[16] = {};
  constexpr UnsignedTable() {
    for (int i = 0; i < 16; ++i) entries[i] = static_cast<uint8_t>(Codes<kBook>::kIntegers[i] + Codes<kBook>::kAdded);
  }
};

template <Codebook kBook>
struct CodebookDots : WideDots {
  static constexpr UnsignedTable<kBook> kTable{};
  static Weights load(const uint8_t* p) { return look_up(WideDots::load(p), kTable.entries); }
  static Sums start(int32_t sum_of_x) { return broadcast(-Codes<kBook>::kAdded * sum_of_x); }
};

#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)

// Two products of unsigned bytes up to 241 would not fit int16: |w| is unsigned and x takes w's sign. x is never -128.
template <>
struct CodebookDots<Codebook::iq4> : WideDots {
  static Weights load(const uint8_t* p) {
    return look_up(WideDots::load(p), reinterpret_cast<const uint8_t*>(Codes<Codebook::iq4>::kIntegers));
  }
  static Sums start(int32_t) { return zero_i(); }
  static __m256i products(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
  }
  static __m256i products(const Half& w, __m256i a, __m256i b) {
    return _mm256_add_epi32(products(w.low, a), products(w.high, b));
  }
  static Sums add(Sums sums, const Weights& w, const int8_t* x) {
    const __m256i a = _mm256_set1_epi32(four_bytes(x)), b = _mm256_set1_epi32(four_bytes(x + 4));
    return {in_register(_mm256_add_epi32(sums.lo, products(w.lo, a, b))),
            in_register(_mm256_add_epi32(sums.hi, products(w.hi, a, b)))};
  }
};

#endif

}  // namespace
}  // namespace quire
