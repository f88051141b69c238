// Codes of 4 and 8 bits as Hugging Face directories and GGUF's NVFP4 store them, a byte each. Next to read: pack.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// Where code [n, k] of a matrix is, in words of 32 bits, the lowest bits first:
//   across  n's words, of neighbouring k: compressed-tensors; bytes (8 bit); NVFP4's pairs
//   down    words of neighbouring k [K / 8 or 4, N]: GPTQ
//   awq     word [k, n / 8] has n in the order 0, 2, 4, 6, 1, 3, 5, 7
//   nvfp4   n's blocks of 64 k: 4 scales, then for each 16 k 8 bytes of which byte i has k = i and, above it, i + 8
//   nvfp4_scales  the scales of these, one for 16 k, without a sign; 0x7f is 0
enum class CodeLayout : int32_t { across4, across8, down4, down8, awq, nvfp4, nvfp4_scales };

struct StoredCodes {
  CodeLayout layout;
  const std::byte* data;
  int64_t stride_bytes;  // between rows of words or blocks
};

// Codes of `num_rows` rows and of columns `first` to `first + count - 1` -> out[r * out_stride + i]. A part of words or
// blocks must not be asked for, but of across8 and awq.
void unpack_codes(const StoredCodes& from, const int64_t* rows, int64_t num_rows, int64_t first, int64_t count,
                  uint8_t* out, int64_t out_stride);

// out[i] = (table[codes[i]] - zeros[g]) * scales[g], g = groups[i].
void decode_codes(const float* table, const float* scales, const float* zeros, const int32_t* groups,
                  const uint8_t* codes, int64_t count, float* out);

}  // namespace quire
