#include "weights/decode.h"

#include <cstring>

#include "weights/half.h"
#include "weights/vectors.h"
#include "weights/wide.h"

namespace quire {
namespace {

uint16_t half_word(Bytes p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
float half_at(Bytes p) { return from_f16(half_word(p)); }
int nibble(Bytes p, int index) { return p[index / 2] >> (index % 2 * 4) & 15; }

// 2 n values: the lower halves of n bytes, then the upper ones.
void nibbles(Bytes from, int n, int8_t* q) {
  for (int i = 0; i < n; ++i) q[i] = static_cast<int8_t>(from[i] & 15);
  for (int i = 0; i < n; ++i) q[n + i] = static_cast<int8_t>(from[i] >> 4);
}
// 128 values of 32 bytes, four 2-bit values each.
void crumbs(Bytes from, int8_t* q) {
  for (int c = 0; c < 4; ++c) {
    for (int i = 0; i < 32; ++i) q[32 * c + i] = static_cast<int8_t>(from[i] >> (2 * c) & 3);
  }
}
void add_to_all(int8_t* q, int count, int added) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(q[i] + added);
}

// Gives the groups of a block of 32 one scale, and one minimum.
void one_scale(Integers& out, float scale, float minimum = 0.0f) {
  for (int g = 0; g < 2; ++g) out.scales[g] = scale, out.minima[g] = minimum;
}

// --- Blocks of 32 -------------------------------------------------------------------------------------------------

template <bool kHasMinimum, bool kHasFifth>
void decode_45(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  one_scale(out, half_at(p), kHasMinimum ? -half_at(p + 2) : 0.0f);
  p += kHasMinimum ? 4 : 2;
  nibbles(p + (kHasFifth ? 4 : 0), 16, out.q);
  if constexpr (kHasFifth) {
    for (int i = 0; i < 32; ++i) out.q[i] = static_cast<int8_t>(out.q[i] | (p[i / 8] >> (i % 8) & 1) << 4);
  }
  if constexpr (!kHasMinimum) add_to_all(out.q, 32, kHasFifth ? -16 : -8);
}

void decode_q8_0(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  one_scale(out, half_at(p));
  std::memcpy(out.q, p + 2, 32);
}

void look_up(Bytes from, const int8_t* values, int8_t* q) {
  nibbles(from, 16, q);
  for (int i = 0; i < 32; ++i) q[i] = values[q[i]];
}
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kDoubledFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void decode_iq4_nl(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  one_scale(out, half_at(p));
  look_up(p + 2, kIq4, out.q);
}

void decode_mxfp4(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  // 2^(p[0] - 128), of which the first two are denormal.
  one_scale(out, float_of_bits(p[0] < 2 ? 0x00200000u << p[0] : static_cast<uint32_t>(p[0] - 1) << 23));
  look_up(p + 1, kDoubledFloats, out.q);
}

// --- K-quants -----------------------------------------------------------------------------------------------------

QUIRE_WIDE
void decode_q2_k(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p + 80), e = half_at(p + 82);
  for (int g = 0; g < 16; ++g) {
    out.scales[g] = d * static_cast<float>(p[g] & 15);
    out.minima[g] = e * static_cast<float>(p[g] >> 4);
  }
  for (int part = 0; part < 2; ++part) crumbs(p + 16 + 32 * part, out.q + 128 * part);
}

QUIRE_WIDE
void decode_q3_k(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p + 108);
  for (int g = 0; g < 16; ++g) {
    const int low = p[96 + g % 8] >> (g / 8 * 4) & 15, high = p[104 + g % 4] >> (g / 4 * 2) & 3;
    out.scales[g] = static_cast<float>((low | high << 4) - 32) * d;
  }
  for (int part = 0; part < 2; ++part) crumbs(p + 32 + 32 * part, out.q + 128 * part);
  for (int g = 0; g < 8; ++g) {
    int8_t* q = out.q + 32 * g;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] | (p[i] >> g & 1) << 2);
  }
}

template <bool kHasFifth>
void decode_q45_k(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p), e = half_at(p + 2);
  const Bytes packed = p + 4;
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | (packed[g - 4] >> 2 & 48);
    const int minimum = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | (packed[g] >> 2 & 48);
    for (int half = 0; half < 2; ++half) {
      out.scales[2 * g + half] = d * static_cast<float>(scale);
      out.minima[2 * g + half] = e * static_cast<float>(minimum);
    }
  }
  for (int part = 0; part < 4; ++part) nibbles(p + (kHasFifth ? 48 : 16) + 32 * part, 32, out.q + 64 * part);
  for (int g = 0; kHasFifth && g < 8; ++g) {
    int8_t* q = out.q + 32 * g;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] | (p[16 + i] >> g & 1) << 4);
  }
}

void decode_q6_k(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p + 208);
  for (int g = 0; g < 16; ++g) out.scales[g] = d * static_cast<float>(static_cast<int8_t>(p[192 + g]));
  int8_t upper[256];
  for (int part = 0; part < 2; ++part) {
    nibbles(p + 64 * part, 64, out.q + 128 * part);
    crumbs(p + 128 + 32 * part, upper + 128 * part);
  }
  for (int i = 0; i < 256; ++i) out.q[i] = static_cast<int8_t>((out.q[i] | upper[i] << 4) - 32);
}

[[gnu::always_inline]] inline void put_scales_of_32(Floats scales, Integers& out) {
  const Floats first = __builtin_shufflevector(scales, scales, 0, 0, 1, 1, 2, 2, 3, 3),
               second = __builtin_shufflevector(scales, scales, 4, 4, 5, 5, 6, 6, 7, 7);
  std::memcpy(out.scales, &first, sizeof first);
  std::memcpy(out.scales + 8, &second, sizeof second);
}

[[gnu::always_inline]] inline Words eight_bytes(Bytes p) {
  Eight bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Words);
}

// --- Codebooks ----------------------------------------------------------------------------------------------------

// Codes are ordered by magnitudes. Signs are added to 32 weights at a time, not eight.
void put_entry_of_4(const int8_t* codebook, int index, int8_t* q) { std::memcpy(q, codebook + 4 * index, 4); }
// Each byte of a word eight times.
[[gnu::always_inline]] inline Octets eight_each(uint32_t word) {
  const auto four = same_bits<Octets>(Words{} + static_cast<int32_t>(word));
  return __builtin_shufflevector(four, four, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 18, 18, 18, 18, 18, 18, 18,
                                 18, 19, 19, 19, 19, 19, 19, 19, 19);
}

// Adds 1 to the codes whose bit is set: bit i % 8 of byte i / 8.
[[gnu::always_inline]] inline Octets with_signs(Octets codes, uint32_t signs) {
  const auto bits = same_bits<Octets>(Longs{} + 0x8040201008040201u);
  return codes - same_bits<Octets>((eight_each(signs) & bits) == bits);
}
[[gnu::always_inline]] inline void add_signs(Bytes signs, int8_t* q) {
  for (int64_t i = 0; i < 256; i += 32) {
    const Octets codes = with_signs(vector_at<Octets>(q + i), read_word(signs + i / 8));
    std::memcpy(q + i, &codes, sizeof codes);
  }
}
// Each byte of a vector has seven signs; its eighth bit is set where that makes the number of minus signs even.
template <typename Signs>
[[gnu::always_inline]] inline Signs with_parities(Signs sevens) {
  auto parity = same_bits<Unsigned>(sevens);  // the other bits of bytes do not reach the lowest ones
  parity ^= parity >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return sevens | same_bits<Signs>((parity & 0x01010101u) << 7);
}

// The bytes of a vector. To take element after element out of its register costs more than to store it.
template <typename Vector>
[[gnu::always_inline]] inline Bytes in_memory(Vector& vector) {
  asm("" : "+m"(vector));
  return reinterpret_cast<Bytes>(&vector);
}

// Puts the 32 entries of a block at q, four in a register, as finish(codes, i) makes them: to read 32 codes that were
// just copied, eight at a time, waits for the copies. place(i) is where `indices` have the index of entry i.
template <typename Place, typename Finish>
[[gnu::always_inline]] inline void put_entries(const int8_t* codebook, Shorts* indices, Place place, Finish finish,
                                               int8_t* q) {
  const Bytes places[2] = {in_memory(indices[0]), in_memory(indices[1])};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const auto entry = [&](int k) {
      const int at = place(4 * i + k);
      // Loads of doubles fill half a register.
      return vector_at<double>(codebook + 8 * int64_t{half_word(places[at / 16] + at % 16 * 2)});
    };
    const Doubles entries = {entry(0), entry(1), entry(2), entry(3)};
    const Octets codes = finish(same_bits<Octets>(entries), i);
    std::memcpy(q + 32 * i, &codes, sizeof codes);
  }
}
// The same for indices of two bytes each.
template <typename Finish>
[[gnu::always_inline]] inline void put_entries(const int8_t* codebook, Octets lower, Octets upper, Finish finish,
                                               int8_t* q) {
  Shorts indices[2] = {
      same_bits<Shorts>(__builtin_shufflevector(lower, upper, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55)),
      same_bits<Shorts>(__builtin_shufflevector(lower, upper, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15,
                                                47, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63))};
  put_entries(codebook, indices, [](int i) { return i / 8 % 2 * 16 + i / 16 * 8 + i % 8; }, finish, q);
}

// Words of four times 7 signs and 4 bits of a scale: gives the signs, and puts the scales.
[[gnu::always_inline]] inline Unsigned signs_of_words(Unsigned words, float d, float factor, Integers& out) {
  put_scales_of_32(d * (0.5f + __builtin_convertvector(same_bits<Words>(words >> 28), Floats)) * factor, out);
  return with_parities((words & 0x7fu) | (words & 0x3f80u) << 1 | (words & 0x1fc000u) << 2 | (words & 0xfe00000u) << 3);
}

QUIRE_WIDE
void decode_iq2_xxs(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const auto first = vector_at<Words>(p + 2), second = vector_at<Words>(p + 34);
  const Words lower = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14),
              words = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
  Unsigned found = signs_of_words(same_bits<Unsigned>(words), half_at(p), 0.25f, out);
  const Bytes signs = in_memory(found);
  put_entries(
      codebook, same_bits<Octets>(lower), Octets{},
      [&](Octets codes, int i) { return with_signs(codes, read_word(signs + 4 * i)); }, out.q);
}

QUIRE_WIDE
void decode_iq3_xxs(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const Unsigned signs = signs_of_words(vector_at<Unsigned>(p + 66), half_at(p), 0.5f, out);
  for (int i = 0; i < 64; ++i) put_entry_of_4(codebook, p[2 + i], out.q + 4 * i);
  add_signs(reinterpret_cast<Bytes>(&signs), out.q);
}

// Scales of 16 values in 4 bits each.
[[gnu::always_inline]] inline void quarter_scales(float d, Bytes scales, Integers& out) {
  for (int i = 0; i < 2; ++i) {
    const Unsigned word = Unsigned{} + read_word(scales + 4 * i);
    const auto nibbles = same_bits<Words>(word >> Unsigned{0, 4, 8, 12, 16, 20, 24, 28} & 15);
    const Floats scaled = d * (0.5f + __builtin_convertvector(nibbles, Floats)) * 0.25f;
    std::memcpy(out.scales + 8 * i, &scaled, sizeof scaled);
  }
}

QUIRE_WIDE
void decode_iq2_xs(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  quarter_scales(half_at(p), p + 66, out);
  Shorts indices[2];
  Octets sevens[2];
  for (int i = 0; i < 2; ++i) {
    const auto words = vector_at<Shorts>(p + 2 + 32 * i);
    indices[i] = words & 511;
    sevens[i] = same_bits<Octets>(words >> 9);
  }
  Octets found =
      with_parities(__builtin_shufflevector(sevens[0], sevens[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                            30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62));
  const Bytes signs = in_memory(found);
  put_entries(
      codebook, indices, [](int i) { return i; },
      [&](Octets codes, int i) { return with_signs(codes, read_word(signs + 4 * i)); }, out.q);
}

QUIRE_WIDE
void decode_iq2_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  quarter_scales(half_at(p), p + 74, out);
  Words upper = eight_bytes(p + 66);
  upper = (upper | upper << 12) & 0x000f000f;
  upper = (upper | upper << 6) & 0x03030303;
  put_entries(
      codebook, vector_at<Octets>(p + 2), same_bits<Octets>(upper),
      [&](Octets codes, int i) { return with_signs(codes, read_word(p + 34 + 4 * i)); }, out.q);
}

QUIRE_WIDE
void decode_iq3_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p);
  for (int g = 0; g < 16; ++g) out.scales[g] = d * static_cast<float>(1 + 2 * nibble(p + 106, g / 2));
  for (int g = 0; g < 8; ++g) {
    const Bytes lower = p + 2 + 8 * g;
    const int upper = p[66 + g];
    for (int k = 0; k < 8; ++k) {
      put_entry_of_4(codebook, lower[k] | (upper << (8 - k) & 0x100), out.q + 32 * g + 4 * k);
    }
  }
  add_signs(p + 74, out.q);
}

// Entries are -1, 0 and 1, as codes 4, 0 and 6, and moved by an eighth: in eighths they are integers, and an eighth of
// a scale is exact. Of an entry that is moved down the code is the other one XOR 3.
constexpr CodeTable kEighths = {1, 0, 0, -1, -7, 7, 9, -9};
[[gnu::always_inline]] inline Words eight_halves(Bytes p) {
  return __builtin_convertvector(vector_at<Halves>(p), Words);
}

QUIRE_WIDE
void decode_iq1_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const Words words = eight_halves(p + 34);
  Words upper = (words | words << 10) & 0x003f003f;
  upper = (upper | upper << 5) & 0x07070707;
  Words down = (words << 16 >> 31) & 0x03030303;
  const Bytes moved = in_memory(down);
  put_scales_of_32(half_at(p) * __builtin_convertvector((words >> 12 & 7) * 2 + 1, Floats) * 0.125f, out);
  put_entries(
      codebook, vector_at<Octets>(p + 2), same_bits<Octets>(upper),
      [&](Octets codes, int i) { return codes ^ same_bits<Octets>(Unsigned{} + read_word(moved + 4 * i)); }, out.q);
}

QUIRE_WIDE
void decode_iq1_m(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const auto word = [p](int i) { return half_word(p + 48 + 2 * i); };
  uint16_t bits = 0;
  for (int i = 0; i < 4; ++i) bits = static_cast<uint16_t>(bits | word(i) >> 12 << (4 * i));
  const float d = from_f16(bits);
  const auto words = vector_at<Halves>(p + 40);  // the upper half of these
  const Halves both[2] = {__builtin_shufflevector(words, words, 4, 4, 4, 4, 5, 5, 5, 5),
                          __builtin_shufflevector(words, words, 6, 6, 6, 6, 7, 7, 7, 7)};
  for (int i = 0; i < 2; ++i) {
    const Words scales = __builtin_convertvector(both[i], Words) >> Words{0, 3, 6, 9, 0, 3, 6, 9} & 7;
    const Floats scaled = d * __builtin_convertvector(2 * scales + 1, Floats) * 0.125f;
    std::memcpy(out.scales + 8 * i, &scaled, sizeof scaled);
  }
  // Of each byte with two times 3 bits and a sign of the shift, two bytes.
  Shorts upper = __builtin_convertvector(vector_at<Sixteen>(p + 32), Shorts);
  upper |= upper << 4;
  Shorts down = (upper >> 3 & 0x0101) | (upper >> 2 & 0x0202);
  const Bytes moved = in_memory(down);
  put_entries(
      codebook, vector_at<Octets>(p), same_bits<Octets>(upper & 0x0707),
      [&](Octets codes, int i) { return codes ^ eight_each(read_word(moved + 4 * i)); }, out.q);
}

void decode_iq4_xs(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p);
  for (int g = 0; g < 8; ++g) {
    const int scale = (nibble(p + 4, g) | (half_word(p + 2) >> (2 * g) & 3) << 4) - 32;
    out.scales[2 * g] = out.scales[2 * g + 1] = d * static_cast<float>(scale);
    look_up(p + 8 + 16 * g, kIq4, out.q + 32 * g);
  }
}

// --- Ternary digits -----------------------------------------------------------------------------------------------

void whole_scale(Integers& out, float d) {
  for (float& scale : out.scales) scale = d;
}

// `count` digits of each byte, which is a fraction of 256: its digits are the whole thirds, one after the other. Their
// codes are 1, 0 and 2.
template <typename Fractions>
[[gnu::always_inline]] inline void put_digits(Fractions rest, int count, int8_t* q) {
  using Signed = decltype(rest == rest);  // which AVX2 compares
  rest ^= 128;
  for (int k = 0; k < count; ++k, q += sizeof rest) {
    const auto value = same_bits<Signed>(rest);
    const Signed is_two = value > 42, codes = 1 + (value > -43) - (is_two + is_two);
    std::memcpy(q, &codes, sizeof codes);
    rest = rest + rest + rest;  // moves 128 by 256
  }
}

QUIRE_WIDE
void decode_tq1_0(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  whole_scale(out, half_at(p + 52));
  put_digits<Octets>(vector_at<Octets>(p), 5, out.q);
  put_digits<Sixteen>(vector_at<Sixteen>(p + 32), 5, out.q + 160);
  // The last four bytes times 1, 3, 9 and 27: four digits of four bytes.
  Sixteen powers;
  for (int i = 0; i < 16; ++i) powers[i] = static_cast<uint8_t>(i < 4 ? 1 : i < 8 ? 3 : i < 12 ? 9 : 27);
  const int32_t last = static_cast<int32_t>(read_word(p + 48));
  put_digits<Sixteen>(powers * same_bits<Sixteen>(Fours{last, last, last, last}), 1, out.q + 240);
}

QUIRE_WIDE
void decode_tq2_0(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  whole_scale(out, half_at(p + 64));
  for (int part = 0; part < 2; ++part) crumbs(p + 32 * part, out.q + 128 * part);
  for (int8_t& q : out.q) q = static_cast<int8_t>(q ^ 1 ^ q >> 1);
}

constexpr CodeTable kCrumbs = {0, 1, 2, 3}, kSignedThree = {-4, -3, -2, -1, 0, 1, 2, 3};
constexpr CodeTable kTernary = {0, -1, 1, 2};
constexpr CodeTable kIq2 = {8, -8, 25, -25, 43, -43};
constexpr CodeTable kIq3Xxs = {4, -4, 12, -12, 20, -20, 28, -28, 36, -36, 44, -44, 52, -52, 62, -62};
constexpr CodeTable kIq3S = {1, -1, 3, -3, 5, -5, 7, -7, 9, -9, 11, -11, 13, -13, 15, -15};

constexpr BlockDecoder kDecoders[] = {
    {"Q4_0", 32, 18, decode_45<false, false>},
    {"Q4_1", 32, 20, decode_45<true, false>},
    {"Q5_0", 32, 22, decode_45<false, true>},
    {"Q5_1", 32, 24, decode_45<true, true>},
    {"Q8_0", 32, 34, decode_q8_0},
    {"Q2_K", 256, 84, decode_q2_k, Codes::q2_k, &kCrumbs},
    {"Q3_K", 256, 110, decode_q3_k, Codes::q3_k, &kSignedThree},
    {"Q4_K", 256, 144, decode_q45_k<false>},
    {"Q5_K", 256, 176, decode_q45_k<true>},
    {"Q6_K", 256, 210, decode_q6_k},
    {"IQ2_XXS", 256, 66, decode_iq2_xxs, Codes::iq2_of_32, &kIq2},
    {"IQ2_XS", 256, 74, decode_iq2_xs, Codes::iq2_of_16, &kIq2},
    {"IQ2_S", 256, 82, decode_iq2_s, Codes::iq2_of_16, &kIq2},
    {"IQ3_XXS", 256, 98, decode_iq3_xxs, Codes::iq3_of_32, &kIq3Xxs},
    {"IQ3_S", 256, 110, decode_iq3_s, Codes::iq3_of_32, &kIq3S},
    {"IQ1_S", 256, 50, decode_iq1_s, Codes::iq1_of_32, &kEighths},
    {"IQ1_M", 256, 56, decode_iq1_m, Codes::iq1_of_16, &kEighths},
    {"IQ4_NL", 32, 18, decode_iq4_nl},
    {"IQ4_XS", 256, 136, decode_iq4_xs},
    {"TQ1_0", 256, 54, decode_tq1_0, Codes::ternary, &kTernary},
    {"TQ2_0", 256, 66, decode_tq2_0, Codes::ternary, &kTernary},
    {"MXFP4", 32, 17, decode_mxfp4},
};

QUIRE_WIDE
void scale_integers(const Integers& from, const CodeTable* table, int64_t count, float* out) {
  // Two loops: the compiler widens bytes well in a plain one, and scales groups well in vectors.
  for (int64_t i = 0; i < count; ++i) out[i] = table == nullptr ? from.q[i] : table->values[from.q[i]];
  for (int64_t i = 0; i < count; i += 8) {
    Floats values;
    std::memcpy(&values, out + i, sizeof values);
    values = values * from.scales[i / 16] - from.minima[i / 16];
    std::memcpy(out + i, &values, sizeof values);
  }
}

}  // namespace

QUIRE_WIDE
void decode_f16(const std::byte* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    out[i] = from_f16(half);
  }
}

const BlockDecoder* find_decoder(const char* name) {
  for (const BlockDecoder& decoder : kDecoders) {
    if (std::strcmp(decoder.name, name) == 0) return &decoder;
  }
  return nullptr;
}

void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out) {
  Integers integers = {};
  for (int64_t i = 0; i < count; i += decoder.inputs, from += decoder.bytes) {
    decoder.decode(from, codebook, integers);
    scale_integers(integers, decoder.table, decoder.inputs, out + i);
  }
}

}  // namespace quire
