// Blocks of GGUF's formats to fp32: the bits of src/quire/weights/dequantize.py, which has their layouts and is the
// reference. Next to read: pack.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// A block as small integers: value i is float(q[i]) * scales[i / 16] - minima[i / 16], rounded twice.
struct Integers {
  int8_t q[256];
  float scales[16];
  float minima[16];
};
using DecodeBlock = void (*)(const std::byte* block, const int8_t* codebook, Integers& out);

struct BlockDecoder {
  const char* name;
  int64_t inputs, bytes;  // of a block
  DecodeBlock decode;
};

// Of formats of blocks; null for others.
const BlockDecoder* find_decoder(const char* name);

// Whole blocks of `count` inputs in all. codebook: of IQ formats with one, the entries of codebooks.py.
void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out);

// One byte for each value: out[i] = (table[codes[i]] - zeros[g]) * scales[g], g = groups[i].
struct Codes {
  const float* table;  // [256]
  const float* scales;
  const float* zeros;
  const int32_t* groups;
};
void decode_codes(const Codes& of_row, const uint8_t* codes, int64_t count, float* out);

}  // namespace quire
