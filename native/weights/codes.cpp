#include "weights/codes.h"

#include <algorithm>
#include <cstring>

#include "weights/wide.h"

namespace quire {
namespace {

constexpr int64_t kWords = 32;
// Rows of words that are fetched ahead: the processor does not foresee steps of many bytes.
constexpr int64_t kAhead = 16;
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

// Of each lane: half i of words[j] becomes half j of words[i].
void transpose_halves(uint32_t (*words)[kWords]) {
  const auto swap = [words](int distance, uint32_t mask) {
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      for (int64_t g = 0; g < kWords; ++g) {
        uint32_t& a = words[i][g];
        uint32_t& b = words[i + distance][g];
        const uint32_t changed = (a >> (4 * distance) ^ b) & mask;
        a ^= changed << (4 * distance);
        b ^= changed;
      }
    }
  };
  swap(4, 0x0000ffffu);
  swap(2, 0x00ff00ffu);
  swap(1, 0x0f0f0f0fu);
}

// At most 8 * kWords columns of rows that share their words. Words of neighbouring rows become words of neighbouring
// columns.
QUIRE_WIDE
void unpack_awq(Bytes words, int64_t stride, const int64_t* rows, int64_t num_rows, int64_t count, uint8_t* out,
                int64_t out_stride) {
  constexpr int kHalves[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  uint32_t turned[8][kWords] = {};
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(words + (i + kAhead) * stride);
    turned[i % 8][i / 8] = read_word(words + i * stride);
  }
  transpose_halves(turned);
  for (int64_t r = 0; r < num_rows; ++r, out += out_stride) {
    const uint32_t* of_row = turned[kHalves[rows[r] % 8]];
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) put(out + i, spread(of_row[i / 8]));
    for (; i < count; ++i) out[i] = of_row[i / 8] >> (i % 8 * 4) & 15;
  }
}

// Apart from decode_codes, so that it is compiled without gathers: they take twice the time (Zen 3).
[[gnu::noinline]] void scale_each(const float* scales, const float* zeros, const int32_t* groups, int64_t count,
                                  float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = (out[i] - zeros[groups[i]]) * scales[groups[i]];
}

}  // namespace

void unpack_codes(const StoredCodes& from, const int64_t* rows, int64_t num_rows, int64_t first, int64_t count,
                  uint8_t* out, int64_t out_stride) {
  const auto data = reinterpret_cast<Bytes>(from.data);
  const int64_t stride = from.stride_bytes;
  switch (from.layout) {
    case CodeLayout::down4:
      for (int64_t i = 0; i < count; i += 8) {
        const Bytes words = data + (first + i) / 8 * stride;
        __builtin_prefetch(words + kAhead * stride + 4 * rows[0]);
        for (int64_t r = 0; r < num_rows; ++r) put(out + r * out_stride + i, spread(read_word(words + 4 * rows[r])));
      }
      return;
    case CodeLayout::down8:
      for (int64_t i = 0; i < count; i += 4) {
        const Bytes words = data + (first + i) / 4 * stride;
        __builtin_prefetch(words + kAhead * stride + 4 * rows[0]);
        for (int64_t r = 0; r < num_rows; ++r) std::memcpy(out + r * out_stride + i, words + 4 * rows[r], 4);
      }
      return;
    case CodeLayout::awq:
      for (int64_t r = 0, end = 0; r < num_rows; r = end) {
        while (end < num_rows && rows[end] / 8 == rows[r] / 8) ++end;
        for (int64_t i = 0; i < count; i += 8 * kWords) {
          unpack_awq(data + (first + i) * stride + rows[r] / 8 * 4, stride, rows + r, end - r,
                     std::min(8 * kWords, count - i), out + r * out_stride + i, out_stride);
        }
      }
      return;
    default:
      break;
  }
  for (int64_t r = 0; r < num_rows; ++r, out += out_stride) {
    const Bytes row = data + rows[r] * stride;
    const int64_t bytes = from.layout == CodeLayout::across8 ? count : count / 2;
    const Bytes next = row + (from.layout == CodeLayout::across8 ? first : first / 2) + bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
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
      scale_each(scales, zeros, groups + i, kRun, out + i);
      continue;
    }
    const float zero = zeros[group], scale = scales[group];
    for (int64_t k = i; k < i + kRun; ++k) out[k] = (out[k] - zero) * scale;
  }
  scale_each(scales, zeros, groups + i, count - i, out + i);
}

}  // namespace quire
