#include "weights/encode.h"

#include <algorithm>
#include <cstring>

#include "weights/half.h"
#include "weights/vectors.h"
#include "weights/wide.h"

namespace quire {
namespace {

constexpr int64_t kVectors = kBlock / kParts;
constexpr int64_t kBlocksAtOnce = kInputsAtOnce / kBlock;

// Lane b becomes pick of all lanes of v[b].
template <typename Pick>
[[gnu::always_inline]] inline Floats across_lanes(const Floats* v, Pick pick) {
  Floats halves[4], quarters[2];
  for (int i = 0; i < 4; ++i) {
    halves[i] = pick(__builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11),
                     __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
  for (int i = 0; i < 2; ++i) {
    const Floats a = halves[2 * i], b = halves[2 * i + 1];
    quarters[i] = pick(__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13),
                       __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
  }
  const Floats a = quarters[0], b = quarters[1];
  return pick(__builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14),
              __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
}
struct Highest {
  [[gnu::always_inline]] Floats operator()(Floats a, Floats b) const { return a > b ? a : b; }
};
struct Sum {
  [[gnu::always_inline]] Floats operator()(Floats a, Floats b) const { return a + b; }
};

// Of eight blocks the lowest and the highest value, or the highest magnitude, and 0, or NaN where a value is not
// finite.
struct Extents {
  Floats low, high, check;
};

template <bool kOfMagnitudes>
[[gnu::always_inline]] inline Extents find_extents(const float* values, int64_t num_blocks) {
  Floats lows[kBlocksAtOnce] = {}, highs[kBlocksAtOnce] = {}, checks[kBlocksAtOnce] = {};
  for (int64_t b = 0; b < num_blocks; ++b, values += kBlock) {
    Floats low = floats_at(values), high = low, check = low * 0.0f;
    for (int64_t i = kParts; i < kBlock; i += kParts) {
      const Floats value = floats_at(values + i);
      low = value < low ? value : low;
      high = value > high ? value : high;
      check += value * 0.0f;
    }
    highs[b] = kOfMagnitudes ? (high > -low ? high : -low) : high;
    lows[b] = -low;
    checks[b] = check;
  }
  const Floats low = kOfMagnitudes ? Floats{} : -across_lanes(lows, Highest{});
  return {low, across_lanes(highs, Highest{}), across_lanes(checks, Sum{})};
}

// The nearest integers within 0 … limit, ties to even: adding 1.5 * 2^23 rounds so.
[[gnu::always_inline]] inline Words rounded_within(Floats value, float limit) {
  const Floats none = {}, most = none + limit;
  value = value > none ? value : none;  // also where it is NaN
  value = value < most ? value : most;
  return same_bits<Words>(value + 12582912.0f) & 255;
}

// Byte 8 k + l of the result is byte k of word l.
[[gnu::always_inline]] inline Octets by_bytes(Words words) {
  const auto octets = same_bits<Octets>(words);
  return __builtin_shufflevector(octets, octets, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29, 2, 6, 10, 14,
                                 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
}

// round((value + shift) * inverse) + offset, kept within 0 … 255 or 15.
template <bool kIsByte>
[[gnu::always_inline]] inline void quantise(const float* values, float shift, float inverse, float offset,
                                            uint8_t* out) {
  Words all = {};  // byte k of word l is value 8 k + l
  for (int64_t k = 0; k < kVectors; ++k) {
    const Floats value = (floats_at(values + k * kParts) + shift) * inverse + offset;
    all |= (kIsByte ? rounded_to_byte(value) : rounded_within(value, 15.0f)) << static_cast<int32_t>(8 * k);
  }
  const Octets ordered = by_bytes(all);
  std::memcpy(out, &ordered, sizeof ordered);
}

// Of each 16 codes, the bits of those below 8 that occur; of four times 16 in the order 0, 2, 1, 3.
[[gnu::always_inline]] inline void find_codes(const uint8_t* codes, uint64_t* to) {
  uint8_t bits[kInputsAtOnce];
  for (int64_t i = 0; i < kInputsAtOnce; i += 16) {
    const Sixteen powers = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const Sixteen found = entries_at(powers, vector_at<Sixteen>(codes + i));
    std::memcpy(bits + i, &found, sizeof found);
  }
  for (int64_t i = 0; i < kInputsAtOnce; i += 64) {
    const auto a = vector_at<Longs>(bits + i), b = vector_at<Longs>(bits + i + 32);
    Longs all = __builtin_shufflevector(a, b, 0, 4, 2, 6) | __builtin_shufflevector(a, b, 1, 5, 3, 7);
    all |= all >> 32;
    all |= all >> 16;
    all = (all | all >> 8) & 255;
    std::memcpy(to + i / 16, &all, sizeof all);
  }
}

// A block's entries are in kVectors vectors: those of the first 16 weights and those of the others, which have a scale
// of their own, or all 8 or 16 where the block has one scale.
template <int kVectors, bool kHasOneScale>
[[gnu::always_inline]] inline void quantise_codes(const Integers& from, const int8_t* table, Quantised& to) {
  const auto* codes = reinterpret_cast<const uint8_t*>(from.q);
  uint64_t found[2 * kBlocksAtOnce];
  find_codes(codes, found);
  float entries[16], inverses[kBlocksAtOnce];
  for (int i = 0; i < 16; ++i) entries[i] = table[kHasOneScale ? i : i % 8];
  const Words bits = {1, 2, 4, 8, 16, 32, 64, 128};
  Floats values[kBlocksAtOnce][kVectors], highest[kBlocksAtOnce];
  for (int64_t b = 0; b < kBlocksAtOnce; ++b) {
    for (int64_t k = 0; k < kVectors; ++k) {
      const int64_t group = 2 * b + (kHasOneScale ? 0 : k);
      values[b][k] = floats_at(entries + 8 * k) * from.scales[group] - from.minima[group];
    }
    const uint64_t* of_block = found + b / 2 * 4 + b % 2;
    const auto of_first = static_cast<int32_t>(of_block[0]), of_second = static_cast<int32_t>(of_block[2]);
    const Words of_values = same_bits<Words>(values[b][0]) & 0x7fffffff;
    Words magnitudes = of_values & ((bits & (kHasOneScale ? of_first | of_second : of_first)) == bits);
    if constexpr (!kHasOneScale) {
      const Words others = same_bits<Words>(values[b][1]) & 0x7fffffff & ((bits & of_second) == bits);
      magnitudes = magnitudes > others ? magnitudes : others;  // ordered as their bits are
    }
    highest[b] = same_bits<Floats>(magnitudes);
  }
  const Floats check = floats_at(from.scales) * 0.0f + floats_at(from.minima) * 0.0f,
               check_2 = floats_at(from.scales + 8) * 0.0f + floats_at(from.minima + 8) * 0.0f;
  const Floats all_checks = __builtin_shufflevector(check, check_2, 0, 2, 4, 6, 8, 10, 12, 14) +
                            __builtin_shufflevector(check, check_2, 1, 3, 5, 7, 9, 11, 13, 15);
  put_steps(across_lanes(highest, Highest{}) / 127.0f + all_checks, to.d, inverses);
  constexpr int kTogether = 4 / kVectors;
  for (int64_t b = 0; b < kBlocksAtOnce; b += kTogether) {
    Words of_blocks = {};
    for (int k = 0; k < 4; ++k) {
      const int64_t block = b + k / kVectors;
      of_blocks |= rounded_to_byte(values[block][k % kVectors] * inverses[block] + 128.0f) << (8 * k);
    }
    const auto ordered = same_bits<Longs>(by_bytes(of_blocks));
    const Two alone[4] = {
        __builtin_shufflevector(ordered, ordered, 0, 0), __builtin_shufflevector(ordered, ordered, 1, 1),
        __builtin_shufflevector(ordered, ordered, 2, 2), __builtin_shufflevector(ordered, ordered, 3, 3)};
    const Two pairs[2] = {__builtin_shufflevector(ordered, ordered, 0, 1),
                          __builtin_shufflevector(ordered, ordered, 2, 3)};
    for (int64_t i = 0; i < kTogether * kBlock; i += 16) {
      const Two of_weights = !kHasOneScale ? alone[i / 16] : kVectors == 1 ? alone[i / kBlock] : pairs[i / kBlock];
      const Sixteen u = entries_at(same_bits<Sixteen>(of_weights), vector_at<Sixteen>(codes + b * kBlock + i));
      std::memcpy(to.u + b * kBlock + i, &u, sizeof u);
    }
  }
}

}  // namespace

QUIRE_WIDE
float largest_magnitude(const float* values, int64_t count, float before) {
  Floats high = Floats{} + before, check = high * 0.0f;
  for (int64_t i = 0; i < count; i += kParts) {
    const Floats value = floats_at(values + i);
    const auto magnitude = same_bits<Floats>(same_bits<Words>(value) & 0x7fffffff);
    high = magnitude > high ? magnitude : high;
    check += value * 0.0f;
  }
  float largest = before;
  for (int64_t l = 0; l < kParts; ++l) largest = std::max(largest, high[l]);
  for (int64_t l = 0; l < kParts; ++l) largest += check[l];
  return largest;
}

QUIRE_WIDE
void round_to_e4m3(float* values, int64_t count, float scale) {
  const float divisor = scale == 0.0f ? 1.0f : scale;
  for (int64_t i = 0; i < count; i += kParts) {
    const Floats value = floats_at(values + i) / divisor;
    // Three bits of the fraction stay. Below 2^-6 values are multiples of 2^-9, as fp32's are around 1.5 * 2^14.
    const auto bits = same_bits<Words>(value);
    const auto normal = same_bits<Floats>((bits + 0x7ffff + (bits >> 20 & 1)) & static_cast<int32_t>(0xfff00000u));
    const Floats small = value + 24576.0f - 24576.0f;
    const Words is_small = (bits & 0x7fffffff) < 0x3c800000;
    const Floats rounded = (is_small ? small : normal) * scale;
    std::memcpy(values + i, &rounded, sizeof rounded);
  }
}

QUIRE_WIDE
void quantise_codes_q8(const Integers& from, const BlockDecoder& decoder, Quantised& to) {
  if (decoder.codes == Codes::of_16) {
    quantise_codes<2, false>(from, decoder.table, to);
  } else if (decoder.codes == Codes::of_32) {
    quantise_codes<1, true>(from, decoder.table, to);
  } else {
    quantise_codes<2, true>(from, decoder.table, to);
  }
}

QUIRE_WIDE
void quantise_q8(const float* values, int64_t num_blocks, Quantised& to) {
  const Extents extents = find_extents<true>(values, num_blocks);
  float inverses[kBlocksAtOnce];
  put_steps(extents.high / 127.0f + extents.check, to.d, inverses);
  for (int64_t b = 0; b < num_blocks; ++b) {
    quantise<true>(values + b * kBlock, 0.0f, inverses[b], 128.0f, to.u + b * kBlock);
  }
}

QUIRE_WIDE
void quantise_q4m(const float* values, int64_t num_blocks, Quantised& to) {
  const Extents extents = find_extents<false>(values, num_blocks);
  float inverses[kBlocksAtOnce];
  put_steps((extents.high - extents.low) / 15.0f + extents.check, to.d, inverses);
  for (int64_t b = 0; b < num_blocks; ++b) {
    to.m[b] = round_to_f16(extents.low[b]);
    quantise<false>(values + b * kBlock, -from_f16(to.m[b]), inverses[b], 0.0f, to.u + b * kBlock);
  }
}

QUIRE_WIDE
void put_rows(const Quantised* rows, int64_t first_lane, WeightFormat target, int64_t first, int64_t count,
              int64_t num_blocks, std::byte* tile) {
  const bool is_q8 = target == WeightFormat::q8;
  const int64_t bytes = is_q8 ? 512 : 256;
  for (int64_t b = 0; b < count; ++b) {
    for (int64_t lane = 0; lane < kTile; lane += kParts) {
      Words of_rows[kParts], lines[kParts];
      for (int64_t r = 0; r < kParts; ++r) of_rows[r] = vector_at<Words>(rows[lane + r].u + b * kBlock);
      transpose(of_rows, lines);
      std::byte* out = tile + (first + b) * bytes + lane * 4;
      // Lanes before the first one belong to others.
      const int64_t kept = std::clamp<int64_t>(first_lane - lane, 0, kParts);
      for (int64_t i = 0; i < (is_q8 ? kParts : kParts / 2); ++i) {
        const Words line = is_q8 ? lines[i] : lines[2 * i] | lines[2 * i + 1] << 4;
        if (kept == 0) {
          std::memcpy(out + i * 64, &line, sizeof line);
        } else {
          std::memcpy(out + i * 64 + 4 * kept, reinterpret_cast<const std::byte*>(&line) + 4 * kept,
                      4 * (kParts - kept));
        }
      }
    }
  }
  std::byte* scales = tile + num_blocks * bytes;
  for (int64_t lane = first_lane; lane < kTile; ++lane) {
    const Quantised& row = rows[lane];
    for (int64_t b = 0; b < count; ++b) {
      std::memcpy(scales + ((first + b) * kTile + lane) * 2, row.d + b, 2);
      if (target == WeightFormat::q4m)
        std::memcpy(scales + ((num_blocks + first + b) * kTile + lane) * 2, row.m + b, 2);
    }
  }
}

}  // namespace quire
