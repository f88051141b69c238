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

struct BlockDecoder {
  const char* name;
  int64_t inputs, bytes;  // of a block
  DecodeBlock decode;
  const int8_t* table = nullptr;  // [16]; null where q are the integers
  // q is below 16, and entries 8 to 15 are the negative ones of 0 to 7; else below 8.
  bool has_negatives = false;
};

// Of formats of blocks; null for others.
const BlockDecoder* find_decoder(const char* name);

// Whole blocks of `count` inputs in all. codebook: of IQ formats with one, the entries of codebooks.py as indices.
void decode_blocks(const BlockDecoder& decoder, const std::byte* from, int64_t count, const int8_t* codebook,
                   float* out);

}  // namespace quire
