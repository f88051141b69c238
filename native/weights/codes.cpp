#include "weights/codes.h"

#include <cstring>

#include "weights/wide.h"

namespace quire {
namespace {

constexpr uint64_t kLowHalves = 0x0f0f0f0f0f0f0f0fu;

// The eight halves of bytes, the lowest one first, in a byte each.
uint64_t spread(uint32_t word) {
  uint64_t bytes = word;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
  bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
  return (bytes | bytes << 4) & kLowHalves;
}

void put(uint8_t* p, uint64_t bytes) { std::memcpy(p, &bytes, sizeof bytes); }

void unpack_across4(Bytes row, int64_t count, uint8_t* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) put(out + i, spread(read_word(row + i / 2)));
  for (; i < count; ++i) out[i] = row[i / 2] >> (i % 2 * 4) & 15;
}

void unpack_nvfp4(Bytes row, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t k = first + i;
    uint64_t pairs;
    std::memcpy(&pairs, row + k / 64 * 36 + 4 + k % 64 / 2, sizeof pairs);
    put(out + i, pairs & kLowHalves);
    put(out + i + 8, pairs >> 4 & kLowHalves);
  }
}

void unpack_scales(Bytes row, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t scale = row[(first + i) / 4 * 36 + (first + i) % 4] & 0x7f;
    out[i] = scale == 0x7f ? 0 : scale;
  }
}

}  // namespace

void unpack_codes(const StoredCodes& from, const int64_t* rows, int64_t num_rows, int64_t first, int64_t count,
                  uint8_t* out, int64_t out_stride) {
  const auto data = reinterpret_cast<Bytes>(from.data);
  const int64_t stride = from.stride_bytes;
  constexpr int kAwqShifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};
  switch (from.layout) {
    case CodeLayout::down4:
      for (int64_t i = 0; i < count; i += 8) {
        const Bytes words = data + (first + i) / 8 * stride;
        for (int64_t r = 0; r < num_rows; ++r) put(out + r * out_stride + i, spread(read_word(words + 4 * rows[r])));
      }
      return;
    case CodeLayout::down8:
      for (int64_t i = 0; i < count; i += 4) {
        const Bytes words = data + (first + i) / 4 * stride;
        for (int64_t r = 0; r < num_rows; ++r) std::memcpy(out + r * out_stride + i, words + 4 * rows[r], 4);
      }
      return;
    case CodeLayout::awq:
      for (int64_t r = 0; r < num_rows; ++r) {
        const Bytes words = data + first * stride + rows[r] / 8 * 4;
        const int shift = kAwqShifts[rows[r] % 8];
        for (int64_t i = 0; i < count; ++i) {
          out[r * out_stride + i] = read_word(words + i * stride) >> shift & 15;
        }
      }
      return;
    default:
      break;
  }
  for (int64_t r = 0; r < num_rows; ++r, out += out_stride) {
    const Bytes row = data + rows[r] * stride;
    if (from.layout == CodeLayout::across4) unpack_across4(row + first / 2, count, out);
    if (from.layout == CodeLayout::across8) std::memcpy(out, row + first, static_cast<size_t>(count));
    if (from.layout == CodeLayout::nvfp4) unpack_nvfp4(row, first, count, out);
    if (from.layout == CodeLayout::nvfp4_scales) unpack_scales(row, first, count, out);
  }
}

QUIRE_WIDE
void decode_codes(const float* table, const float* scales, const float* zeros, const int32_t* groups,
                  const uint8_t* codes, int64_t count, float* out) {
  constexpr int64_t kRun = 16;
  for (int64_t i = 0; i < count; ++i) out[i] = table[codes[i]];
  int64_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    const int32_t group = groups[i];
    int32_t differing = 0;
    for (int64_t k = 0; k < kRun; ++k) differing |= groups[i + k] ^ group;
    if (differing != 0) {  // columns in another order
      for (int64_t k = i; k < i + kRun; ++k) out[k] = (out[k] - zeros[groups[k]]) * scales[groups[k]];
      continue;
    }
    const float zero = zeros[group], scale = scales[group];
    for (int64_t k = i; k < i + kRun; ++k) out[k] = (out[k] - zero) * scale;
  }
  for (; i < count; ++i) out[i] = (out[i] - zeros[groups[i]]) * scales[groups[i]];
}

}  // namespace quire
