// Blocks of GGUF's formats to fp32: the bits of src/quire/weights/dequantize.py, which has their layouts and is the
// reference. Next to read: pack.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// A block as small integers: value i is float(q[i]) * scales[i / 16] - minima[i / 16], rounded twice. Where its decoder
// has a table, q[i] stands for table[q[i]].
struct Integers {
  int8_t q[256];
  float scales[16];
  float minima[16];
};
using DecodeBlock = void (*)(const std::byte* block, const int8_t* codebook, Integers& out);

// How integers are stored in Integers::q: as they are, or as indices of a table: below 8 with a scale for each 16 or
// for each 32; or below 16 with a scale for each 32, entries 8 to 15 being the negative ones of 0 to 7.
enum class Codes { none, of_16, of_32, signed_of_32 };

struct BlockDecoder {
  const char* name;
  int64_t inputs, bytes;  // of a block
  DecodeBlock decode;
  Codes codes = Codes::none;
  const int8_t* table = nullptr;  // [16]
};

// Of formats of blocks; null for others.
const BlockDecoder* find_decoder(const char* name);

// Whole blocks of `count` inputs in all. codebook: of IQ formats with one, the entries of codebooks.py as indices.
void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out);

}  // namespace quire
