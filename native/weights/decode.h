// Blocks of GGUF's formats to fp32: the bits of the gguf package's quants.dequantize. Next to read: pack.h.
//
// clang-format off
// Layouts (ggml-common.h of ggml): byte ranges within a block; d and m fp16; "lo, hi" are the lower halves of some bytes,
// then their upper halves; crumbs are four 2-bit values a byte; w = the weight of a code q, with s its group's scale.
//   Q4_0, Q4_1     0:2 d, _1: 2:4 m, then 16 of lo, hi. w = d (q - 8), _1: d q + m
//   Q5_0, Q5_1     the same with four bytes of fifth bits before lo, hi. w = d (q - 16), _1: d q + m
//   Q8_0           0:2 d, 2:34 int8. w = d q
//   Q2_K           0:16 s (lo), minimum (hi) of each 16, 16:80 crumbs, 80:82 d, 82:84 dmin. w = d s q - dmin m
//   Q3_K           0:32 third bits, 32:96 crumbs, 96:108 s of each 16, 108:110 d. w = d (s - 32) (q - 4). s has its
//                  lower 4 bits in 96:104 (lo of all eight bytes, then hi), its upper 2 as crumbs in 104:108
//   Q4_K, Q5_K     0:2 d, 2:4 dmin, 4:16 s and minimum of each 32, Q5_K: 16:48 fifth bits, 128 of lo, hi.
//                  w = d s q - dmin m. 6 bits each: the first four in 4:8 and 8:12; the last four have their lower
//                  bits as lo (s) and hi (minimum) of 12:16, their upper ones on top of the first four
//   Q6_K           0:128 lo, hi, 128:192 crumbs on top, 192:208 int8 s of each 16, 208:210 d. w = d s (q - 32)
//   MXFP4          exponent of the scale at 0, 1:17 lo, hi of floats of 4 bits
//   IQ4_NL         0:2 d, 2:18 lo, hi. w = d value(q)
//   IQ4_XS         0:2 d, 2:4 upper 2 and 4:8 lower 4 bits of s, per 32 weights 16 of lo, hi. w = d (s - 32) value(q)
//   IQ2_XXS        0:2 d; per 32: four indices, a word with four times 7 signs, then 4 bits of s. w = d (s + 1/2) / 4 entry
//   IQ3_XXS        0:2 d, 2:66 indices, then such a word per 32. w = d (s + 1/2) / 2 entry
//   IQ2_XS         0:2 d, 2:66 words of a 9-bit index and 7 signs, 66:74 s of each 16. w = d (s + 1/2) / 4 entry
//   IQ2_S          0:2 d, 2:34 lower 8 bits of indices, 34:66 signs, 66:74 upper 2 bits, 74:82 s of each 16
//   IQ3_S          0:2 d, 2:66 lower 8 bits of indices, 66:74 ninth bits, 74:106 signs, 106:110 s per 32.
//                  w = d (2 s + 1) entry
//   IQ1_S          0:2 d, 2:34 lower 8 bits of indices, words of four times 3 upper bits, 3 bits s, the shift's sign.
//                  w = d (2 s + 1) (entry +- 1/8)
//   IQ1_M          0:32 lower 8 bits of indices, 32:48 nibbles of 3 upper bits and the shift's sign, 48:56 four words
//                  with four s of 3 bits, each of 16 weights, and 4 bits of d, the lowest first
//   TQ1_0          ternary digits, five in a byte of 0:32 and of 32:48, four in one of 48:52; 52:54 d. w = d (digit - 1);
//                  digit i of byte b is 3 (b 3^i mod 256) / 256, rounded down
//   TQ2_0          0:64 crumbs, 64:66 d. w = d (q - 1)
// clang-format on
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace quire {

// A block as small integers: value i is float(q[i]) * scales[i / 16] - minima[i / 16], rounded twice. Where its decoder
// has a table, q[i] stands for table->values[q[i]].
struct Integers {
  int8_t q[256];
  float scales[16];
  float minima[16];  // decoders of formats without leave them alone: zeros
};
using DecodeBlock = void (*)(const std::byte* block, const int8_t* codebook, Integers& out);

// How integers are stored in Integers::q: as they are, or as indices of a table, with a scale for each 16 or for
// each 32. Larger codes have no smaller magnitudes, but of Q3_K, and of Q2_K, which has minima.
enum class Codes { none, q2_k, q3_k, iq1_of_16, iq1_of_32, iq2_of_16, iq2_of_32, iq3_of_32, ternary };

// What 16 codes stand for, and their magnitudes.
struct CodeTable {
  float values[16] = {};
  uint8_t magnitudes[16] = {};

  constexpr CodeTable(std::initializer_list<int> entries) {
    int code = 0;
    for (int entry : entries) {
      values[code] = static_cast<float>(entry);
      magnitudes[code++] = static_cast<uint8_t>(entry < 0 ? -entry : entry);
    }
  }
};

struct BlockDecoder {
  const char* name;
  int64_t inputs, bytes;  // of a block
  DecodeBlock decode;
  Codes codes = Codes::none;
  const CodeTable* table = nullptr;
};

// Of formats of blocks; null for others.
const BlockDecoder* find_decoder(const char* name);

// Whole blocks of `count` inputs in all. codebook: of IQ formats with one, the entries of weight_tensor.py as indices.
void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out);

// Halves, of which no decoder makes integers.
void decode_f16(const std::byte* from, int64_t count, float* out);

}  // namespace quire
