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
void no_minima(Integers& out) { std::memset(out.minima, 0, sizeof out.minima); }

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
  no_minima(out);
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
  no_minima(out);
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
uint64_t entry_of_8(const int8_t* codebook, uint32_t index) {
  uint64_t entry;
  std::memcpy(&entry, codebook + 8 * uint64_t{index}, sizeof entry);
  return entry;
}

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

// Entries index(g, k), k = 0 to 3, of 32 weights each, as finish(entries, g) makes them. In a register: to read 32 codes
// that were just copied, eight at a time, waits for the copies.
template <typename Index, typename Finish>
[[gnu::always_inline]] inline void put_entries_of_8(const int8_t* codebook, Index index, Finish finish, int8_t* q) {
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const Longs entries = {entry_of_8(codebook, index(g, 0)), entry_of_8(codebook, index(g, 1)),
                           entry_of_8(codebook, index(g, 2)), entry_of_8(codebook, index(g, 3))};
    const Octets codes = finish(same_bits<Octets>(entries), g);
    std::memcpy(q + 32 * g, &codes, sizeof codes);
  }
}
// Indices of eight groups: byte k of `lower`, and what upper(k) puts above it.
template <typename Upper>
[[gnu::always_inline]] inline void put_indices(Words lower, Upper upper, uint32_t (*indices)[8]) {
  for (int k = 0; k < 4; ++k) {
    const Words index = (lower >> (8 * k) & 255) | upper(k);
    std::memcpy(indices[k], &index, sizeof index);
  }
}

// Words of four times 7 signs and 4 bits of a scale: gives the signs, and puts the scales.
[[gnu::always_inline]] inline Unsigned signs_of_words(Unsigned words, float d, float factor, Integers& out) {
  put_scales_of_32(d * (0.5f + __builtin_convertvector(same_bits<Words>(words >> 28), Floats)) * factor, out);
  no_minima(out);
  return with_parities((words & 0x7fu) | (words & 0x3f80u) << 1 | (words & 0x1fc000u) << 2 | (words & 0xfe00000u) << 3);
}

QUIRE_WIDE
void decode_iq2_xxs(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const auto first = vector_at<Words>(p + 2), second = vector_at<Words>(p + 34);
  const Words lower = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14),
              words = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
  uint32_t indices[4][8], signs[8];
  const Unsigned found = signs_of_words(same_bits<Unsigned>(words), half_at(p), 0.25f, out);
  std::memcpy(signs, &found, sizeof found);
  put_indices(lower, [](int) { return Words{}; }, indices);
  put_entries_of_8(
      codebook, [&](int g, int k) { return indices[k][g]; },
      [&](Octets codes, int g) { return with_signs(codes, signs[g]); }, out.q);
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
  no_minima(out);
}

QUIRE_WIDE
void decode_iq2_xs(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  quarter_scales(half_at(p), p + 66, out);
  uint16_t indices[32];
  Octets sevens[2];
  for (int i = 0; i < 2; ++i) {
    const auto words = vector_at<Shorts>(p + 2 + 32 * i);
    const Shorts lower = words & 511;
    std::memcpy(indices + 16 * i, &lower, sizeof lower);
    sevens[i] = same_bits<Octets>(words >> 9);
  }
  const Octets signs = with_parities(__builtin_shufflevector(
      sevens[0], sevens[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46,
      48, 50, 52, 54, 56, 58, 60, 62));
  const auto* bytes = reinterpret_cast<Bytes>(&signs);
  put_entries_of_8(
      codebook, [&](int g, int k) { return indices[4 * g + k]; },
      [&](Octets codes, int g) { return with_signs(codes, read_word(bytes + 4 * g)); }, out.q);
}

QUIRE_WIDE
void decode_iq2_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  quarter_scales(half_at(p), p + 74, out);
  const Words upper = eight_bytes(p + 66);
  uint32_t indices[4][8];
  put_indices(vector_at<Words>(p + 2), [&](int k) { return (upper << (8 - 2 * k)) & 0x300; }, indices);
  put_entries_of_8(
      codebook, [&](int g, int k) { return indices[k][g]; },
      [&](Octets codes, int g) { return with_signs(codes, read_word(p + 34 + 4 * g)); }, out.q);
}

QUIRE_WIDE
void decode_iq3_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p);
  for (int g = 0; g < 16; ++g) out.scales[g] = d * static_cast<float>(1 + 2 * nibble(p + 106, g / 2));
  no_minima(out);
  for (int g = 0; g < 8; ++g) {
    const Bytes lower = p + 2 + 8 * g;
    const int upper = p[66 + g];
    for (int k = 0; k < 8; ++k) {
      put_entry_of_4(codebook, lower[k] | (upper << (8 - k) & 0x100), out.q + 32 * g + 4 * k);
    }
  }
  add_signs(p + 74, out.q);
}

// Entries are -1, 0 and 1, as codes 4, 0 and 6, and moved by an eighth: in eighths they are integers, and an eighth of a
// scale is exact. Of an entry that is moved down the code is the other one XOR 3.
constexpr CodeTable kEighths = {1, 0, 0, -1, -7, 7, 9, -9};
// Four entries for each of eight groups, from bytes of their indices and words with 3 upper bits for each: those of
// entry k from bit `width` * k on. Byte k of a word of `down` is 3 where the entry is moved down, else 0.
[[gnu::always_inline]] inline void put_eighths(Bytes lower, Words upper, Words down, int width, const int8_t* codebook,
                                               int8_t* q) {
  uint32_t indices[4][8], moved[8];
  put_indices(vector_at<Words>(lower), [&](int k) { return (upper >> (width * k) & 7) << 8; }, indices);
  std::memcpy(moved, &down, sizeof down);
  put_entries_of_8(
      codebook, [&](int g, int k) { return indices[k][g]; },
      [&](Octets codes, int g) { return codes ^ eight_each(moved[g]); }, q);
}
[[gnu::always_inline]] inline Words eight_halves(Bytes p) {
  return __builtin_convertvector(vector_at<Halves>(p), Words);
}

QUIRE_WIDE
void decode_iq1_s(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const Words words = eight_halves(p + 34), down = (words >> 15) * 0x03030303;
  put_scales_of_32(half_at(p) * __builtin_convertvector((words >> 12 & 7) * 2 + 1, Floats) * 0.125f, out);
  no_minima(out);
  put_eighths(p + 2, words, down, 3, codebook, out.q);
}

QUIRE_WIDE
void decode_iq1_m(const std::byte* block, const int8_t* codebook, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const auto word = [p](int i) { return half_word(p + 48 + 2 * i); };
  uint16_t bits = 0;
  for (int i = 0; i < 4; ++i) bits = static_cast<uint16_t>(bits | word(i) >> 12 << (4 * i));
  const float d = from_f16(bits);
  no_minima(out);
  const auto words = vector_at<Halves>(p + 40);  // the upper half of these
  const Halves both[2] = {__builtin_shufflevector(words, words, 4, 4, 4, 4, 5, 5, 5, 5),
                          __builtin_shufflevector(words, words, 6, 6, 6, 6, 7, 7, 7, 7)};
  for (int i = 0; i < 2; ++i) {
    const Words scales = __builtin_convertvector(both[i], Words) >> Words{0, 3, 6, 9, 0, 3, 6, 9} & 7;
    const Floats scaled = d * __builtin_convertvector(2 * scales + 1, Floats) * 0.125f;
    std::memcpy(out.scales + 8 * i, &scaled, sizeof scaled);
  }
  const Words upper = eight_halves(p + 32);
  const Words down = (upper >> 3 & 1) | (upper << 1 & 0x100) | (upper << 5 & 0x10000) | (upper << 9 & 0x1000000);
  put_eighths(p, upper, down | down << 1, 4, codebook, out.q);
}

void decode_iq4_xs(const std::byte* block, const int8_t*, Integers& out) {
  const auto* p = reinterpret_cast<Bytes>(block);
  const float d = half_at(p);
  no_minima(out);
  for (int g = 0; g < 8; ++g) {
    const int scale = (nibble(p + 4, g) | (half_word(p + 2) >> (2 * g) & 3) << 4) - 32;
    out.scales[2 * g] = out.scales[2 * g + 1] = d * static_cast<float>(scale);
    look_up(p + 8 + 16 * g, kIq4, out.q + 32 * g);
  }
}

// --- Ternary digits -----------------------------------------------------------------------------------------------

void whole_scale(Integers& out, float d) {
  for (float& scale : out.scales) scale = d;
  no_minima(out);
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

const BlockDecoder* find_decoder(const char* name) {
  for (const BlockDecoder& decoder : kDecoders) {
    if (std::strcmp(decoder.name, name) == 0) return &decoder;
  }
  return nullptr;
}

void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out) {
  Integers integers;
  for (int64_t i = 0; i < count; i += decoder.inputs, from += decoder.bytes) {
    decoder.decode(from, codebook, integers);
    scale_integers(integers, decoder.table, decoder.inputs, out + i);
  }
}

}  // namespace quire
