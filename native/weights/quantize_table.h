// What each instruction set provides to quantise blocks (weights/quantize_blocks.h).
#pragma once
#include <cstddef>

namespace quire {

struct BlockQuantizer {
  const char* format;  // GGUF's name
  int len, bytes;      // weights and bytes of a block
  // Writes one block. x, w: values and weights of their squared errors, [len].
  void (*encode)(const float* x, const float* w, std::byte* out);
};
constexpr int kNumQuantizers = 10;

}  // namespace quire
