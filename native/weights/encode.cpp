#include "weights/encode.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

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

// Byte 8 k + l of the result is byte k of word l. Two steps, each of one instruction.
[[gnu::always_inline]] inline Octets by_bytes(Words words) {
  const auto octets = same_bits<Octets>(words);
  const auto fours =
      same_bits<Words>(__builtin_shufflevector(octets, octets, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 16,
                                               20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31));
  return same_bits<Octets>(__builtin_shufflevector(fours, fours, 0, 4, 1, 5, 2, 6, 3, 7));
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

// Pairs (x of a, x of b) of elements of T, the lower half of each 16 bytes or the upper.
template <typename T, bool kIsUpper>
[[gnu::always_inline]] inline Octets pairs(Octets a, Octets b) {
  if constexpr (sizeof(T) == 1) {
    constexpr int k = kIsUpper ? 8 : 0;
    return __builtin_shufflevector(a, b, k, k + 32, k + 1, k + 33, k + 2, k + 34, k + 3, k + 35, k + 4, k + 36, k + 5,
                                   k + 37, k + 6, k + 38, k + 7, k + 39, k + 16, k + 48, k + 17, k + 49, k + 18, k + 50,
                                   k + 19, k + 51, k + 20, k + 52, k + 21, k + 53, k + 22, k + 54, k + 23, k + 55);
  } else if constexpr (sizeof(T) == 2) {
    constexpr int k = kIsUpper ? 4 : 0;
    const auto x = same_bits<Shorts>(a), y = same_bits<Shorts>(b);
    return same_bits<Octets>(__builtin_shufflevector(x, y, k, k + 16, k + 1, k + 17, k + 2, k + 18, k + 3, k + 19,
                                                     k + 8, k + 24, k + 9, k + 25, k + 10, k + 26, k + 11, k + 27));
  } else {
    constexpr int k = kIsUpper ? 2 : 0;
    const auto x = same_bits<Words>(a), y = same_bits<Words>(b);
    return same_bits<Octets>(__builtin_shufflevector(x, y, k, k + 8, k + 1, k + 9, k + 4, k + 12, k + 5, k + 13));
  }
}
template <typename T>
[[gnu::always_inline]] inline Octets larger(Octets a, Octets b) {
  const Octets lower = pairs<T, false>(a, b), upper = pairs<T, true>(a, b);
  return lower > upper ? lower : upper;
}

// Bytes 0 to 3 of the lower half of `octets`, and bytes 4 to 7 of the upper one.
[[gnu::always_inline]] inline Floats floats_of(Longs octets) {
  const auto all = same_bits<Octets>(octets);
  const Octets fours = __builtin_shufflevector(all, all, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 20, 20, 20, 20,
                                               21, 21, 21, 21, 22, 22, 22, 22, 23, 23, 23, 23);
  return __builtin_convertvector(same_bits<Words>(fours) & 255, Floats);
}

[[gnu::always_inline]] inline Octets joined(Sixteen first, Sixteen second) {
  return same_bits<Octets>(__builtin_shufflevector(same_bits<Two>(first), same_bits<Two>(second), 0, 1, 2, 3));
}
[[gnu::always_inline]] inline Sixteen larger_of(Sixteen a, Sixteen b) { return a > b ? a : b; }

// Of eight blocks, found(the largest bytes of entry(16 codes)): for the first 16 weights and for the others, or, where
// they have one scale, for all 32 in largest[0].
template <bool kHasOneScale, typename Entry, typename Found>
[[gnu::always_inline]] inline void largest_entries(const uint8_t* codes, Entry entry, Found found, Floats* largest) {
  const auto half = [&](int64_t i) { return entry(vector_at<Sixteen>(codes + 16 * i)); };
  Octets all[kBlocksAtOnce];
  if constexpr (kHasOneScale) {
    for (int64_t b = 0; b < kBlocksAtOnce / 2; ++b) {
      all[b] = joined(larger_of(half(2 * b), half(2 * b + 1)), larger_of(half(2 * b + 8), half(2 * b + 9)));
    }
  } else {
    for (int64_t b = 0; b < kBlocksAtOnce; ++b) all[b] = joined(half(2 * b), half(2 * b + 1));
    for (int i = 0; i < 4; ++i) all[i] = larger<uint8_t>(all[2 * i], all[2 * i + 1]);
  }
  // Bytes of neighbouring blocks become neighbours.
  using Next = std::conditional_t<kHasOneScale, uint8_t, uint16_t>;
  using Last = std::conditional_t<kHasOneScale, uint16_t, uint32_t>;
  for (int i = 0; i < 2; ++i) all[i] = larger<Next>(all[2 * i], all[2 * i + 1]);
  all[0] = larger<Last>(all[0], all[1]);
  const auto turn = [&](auto turned) {
    const auto other = same_bits<Octets>(turned);
    all[0] = all[0] > other ? all[0] : other;
  };
  const auto halves = same_bits<Longs>(all[0]);
  turn(__builtin_shufflevector(halves, halves, 1, 0, 3, 2));
  if constexpr (kHasOneScale) {
    const auto words = same_bits<Words>(all[0]);
    turn(__builtin_shufflevector(words, words, 1, 0, 3, 2, 5, 4, 7, 6));
  }
  const auto both = same_bits<Longs>(all[0]);
  const auto values = same_bits<Two>(found(same_bits<Sixteen>(__builtin_shufflevector(both, both, 0, 2))));
  if constexpr (kHasOneScale) {
    largest[0] = floats_of(__builtin_shufflevector(values, values, 0, 0, 1, 1));
  } else {
    largest[0] = floats_of(__builtin_shufflevector(values, values, 0, 0, 0, 0));
    largest[1] = floats_of(__builtin_shufflevector(values, values, 1, 1, 1, 1));
  }
}

// Of the groups of 16 weights of eight blocks: values of the first groups, and of the second ones.
struct OfGroups {
  Floats first, second;
  [[gnu::always_inline]] explicit OfGroups(const float* values) {
    const Floats a = floats_at(values), b = floats_at(values + 8);
    first = in_order(__builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14));
    second = in_order(__builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
  }
  [[gnu::always_inline]] static Floats in_order(Floats pairs) {
    const auto longs = same_bits<Longs>(pairs);
    return same_bits<Floats>(__builtin_shufflevector(longs, longs, 0, 2, 1, 3));
  }
};

[[gnu::always_inline]] inline Floats magnitude(Floats value) {
  return same_bits<Floats>(same_bits<Words>(value) & 0x7fffffff);
}

// How the weights of a format are quantised. kUsed: bits of the table's codes that occur, in a block of 16 or of 32.
template <uint32_t kCodes, bool kIsOrderedByMagnitude, bool kHasOneScalePerBlock, bool kHasMinimumPerGroup = false>
struct Coded {
  static constexpr uint32_t kUsed = kCodes;
  static constexpr bool kIsOrdered = kIsOrderedByMagnitude, kHasOneScale = kHasOneScalePerBlock,
                        kHasMinima = kHasMinimumPerGroup;
  static constexpr int kWords = kUsed >> 8 ? 4 : kUsed >> 4 ? 2 : 1;  // of a table
};

// The largest magnitude of each of eight blocks, NaN where one is not finite.
template <typename Kind>
[[gnu::always_inline]] inline Floats largest_magnitudes(const Integers& from, const CodeTable& table) {
  const auto* codes = reinterpret_cast<const uint8_t*>(from.q);
  const OfGroups scales(from.scales);
  Floats largest[2];
  const auto magnitudes = vector_at<Sixteen>(table.magnitudes);
  const auto same = [](Sixteen some) { return some; };
  const auto magnitudes_of = [&](Sixteen some) { return entries_at(magnitudes, some); };
  if constexpr (Kind::kHasMinima) {  // values lie between those of the largest code and of the least one
    const OfGroups minima(from.minima);
    largest_entries<false>(codes, same, same, largest);
    Floats first = magnitude(largest[0] * scales.first - minima.first),
           second = magnitude(largest[1] * scales.second - minima.second);
    largest_entries<false>(codes, [](Sixteen some) { return 255 - some; }, same, largest);
    const Floats other_first = magnitude((255.0f - largest[0]) * scales.first - minima.first),
                 other_second = magnitude((255.0f - largest[1]) * scales.second - minima.second);
    first = other_first > first ? other_first : first;
    second = other_second > second ? other_second : second;
    const Floats check = scales.first * 0.0f + scales.second * 0.0f + (minima.first * 0.0f + minima.second * 0.0f);
    return (first > second ? first : second) + check;
  } else if constexpr (Kind::kHasOneScale) {
    largest_entries<true>(codes, same, magnitudes_of, largest);
    return magnitude(largest[0] * scales.first) + scales.first * 0.0f;
  } else {
    if constexpr (Kind::kIsOrdered) {
      largest_entries<false>(codes, same, magnitudes_of, largest);
    } else {
      largest_entries<false>(codes, magnitudes_of, same, largest);
    }
    const Floats first = magnitude(largest[0] * scales.first), second = magnitude(largest[1] * scales.second);
    return (first > second ? first : second) + (scales.first * 0.0f + scales.second * 0.0f);
  }
}

// Word b has byte k = entry `kFirst` + k of block b as q8. Without kIsKept, entries beyond the largest used one may be
// any byte, as may those that no code means.
template <typename Kind, bool kIsKept, int kFirst>
[[gnu::always_inline]] inline Words four_entries(const float* entries, Floats scale, Floats minimum, Floats inverse) {
  Shorts rounded[4] = {};
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    if ((Kind::kUsed >> (kFirst + k) & 1) == 0) continue;
    Floats value = scale * entries[kFirst + k];
    if constexpr (Kind::kHasMinima) value -= minimum;
    value = value * inverse + 128.0f;
    const Words bits = kIsKept ? rounded_to_byte(value) : same_bits<Words>(value + 12582912.0f);
    rounded[k] = same_bits<Shorts>(k < 2 ? bits : bits << 16);
  }
  Shorts pairs[2];
  for (int k = 0; k < 2; ++k) {
    pairs[k] =
        __builtin_shufflevector(rounded[k], rounded[k + 2], 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31);
  }
  return same_bits<Words>((pairs[0] & 255) | pairs[1] << 8);
}

// A block's bytes by its codes; of two tables the second one, from byte 8 on, is that of the last 16 weights.
template <bool kHasOneTable>
[[gnu::always_inline]] inline void look_up(Two table, const uint8_t* codes, uint8_t* to) {
  const auto bytes = same_bits<Sixteen>(table);
  const Sixteen first = entries_at(bytes, vector_at<Sixteen>(codes));
  auto last = vector_at<Sixteen>(codes + 16);
  if constexpr (!kHasOneTable) last |= 8;
  const Sixteen second = entries_at(bytes, last);
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + 16, &second, sizeof second);
}

// Two tables of a block, for its first 16 weights and for the others, which have a scale of their own, or one where the
// block has one scale. Steps of all rows come first: each waits long for the one before.
template <typename Kind>
[[gnu::always_inline]] inline void quantise_codes(const Integers* rows, int64_t num_rows, const CodeTable& table,
                                                  Quantised* to) {
  float inverses[kTile][kBlocksAtOnce];
  bool is_kept[kTile];
  Floats largest[kTile];
  for (int64_t r = 0; r < num_rows; ++r) {
    largest[r] = largest_magnitudes<Kind>(rows[r], table);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    put_steps(largest[r] / 127.0f, to[r].d, inverses[r]);
    is_kept[r] = !are_bytes(largest[r], floats_at(inverses[r]));
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const auto* codes = reinterpret_cast<const uint8_t*>(rows[r].q);
    const OfGroups scales(rows[r].scales), minima(rows[r].minima);
    const Floats inverse = floats_at(inverses[r]);
    Words words[4] = {};  // of eight blocks each
    const auto put_words = [&]<bool kIsKept>() {
      const auto put = [&]<int kWord>() {
        if constexpr (kWord < Kind::kWords) {
          words[kWord] = four_entries<Kind, kIsKept, 4 * kWord>(table.values, scales.first, minima.first, inverse);
        }
        if constexpr (kWord < Kind::kWords && !Kind::kHasOneScale) {
          words[2 + kWord] =
              four_entries<Kind, kIsKept, 4 * kWord>(table.values, scales.second, minima.second, inverse);
        }
      };
      put.template operator()<0>();
      put.template operator()<1>();
      put.template operator()<2>();
      put.template operator()<3>();
    };
    is_kept[r] ? put_words.template operator()<true>() : put_words.template operator()<false>();
    // Of all blocks the words i become 16 bytes: of blocks 0 and 4, 1 and 5, ...
    const Words low[2] = {__builtin_shufflevector(words[0], words[1], 0, 8, 1, 9, 4, 12, 5, 13),
                          __builtin_shufflevector(words[2], words[3], 0, 8, 1, 9, 4, 12, 5, 13)};
    const Words high[2] = {__builtin_shufflevector(words[0], words[1], 2, 10, 3, 11, 6, 14, 7, 15),
                           __builtin_shufflevector(words[2], words[3], 2, 10, 3, 11, 6, 14, 7, 15)};
    const Words tables[4] = {__builtin_shufflevector(low[0], low[1], 0, 1, 8, 9, 4, 5, 12, 13),
                             __builtin_shufflevector(low[0], low[1], 2, 3, 10, 11, 6, 7, 14, 15),
                             __builtin_shufflevector(high[0], high[1], 0, 1, 8, 9, 4, 5, 12, 13),
                             __builtin_shufflevector(high[0], high[1], 2, 3, 10, 11, 6, 7, 14, 15)};
    for (int64_t b = 0; b < kBlocksAtOnce / 2; ++b) {
      const auto both = same_bits<Longs>(tables[b]);
      look_up<Kind::kHasOneScale>(__builtin_shufflevector(both, both, 0, 1), codes + b * kBlock, to[r].u + b * kBlock);
      const int64_t second = (b + kBlocksAtOnce / 2) * kBlock;
      look_up<Kind::kHasOneScale>(__builtin_shufflevector(both, both, 2, 3), codes + second, to[r].u + second);
    }
  }
}

// Block b of eight rows: of q8 eight vectors of four inputs each, else four of eight inputs.
template <bool kIsQ8>
[[gnu::always_inline]] inline void read_lines(const Quantised* rows, int64_t b, Words* lines) {
  Bytes inputs[2][kParts];
  for (int64_t r = 0; r < kParts; ++r) {
    inputs[0][r] = rows[r].u + b * kBlock;
    inputs[1][r] = inputs[0][r] + 16;
  }
  four_words(inputs[0], lines);
  four_words(inputs[1], lines + 4);
  for (int64_t i = 0; !kIsQ8 && i < kParts / 2; ++i) lines[i] = lines[2 * i] | lines[2 * i + 1] << 4;
}

template <bool kIsQ8>
[[gnu::always_inline]] inline void put_rows(const Quantised* rows, int64_t first_lane, int64_t first, int64_t count,
                                            int64_t num_blocks, std::byte* tile) {
  constexpr int64_t kBytes = kIsQ8 ? 512 : 256, kLines = kBytes / 64;
  for (int64_t b = 0; b < count; ++b) {
    Words lines[2][kParts];
    for (int64_t half = 0; half < 2; ++half) read_lines<kIsQ8>(rows + half * kParts, b, lines[half]);
    std::byte* out = tile + (first + b) * kBytes;
    for (int64_t i = 0; i < kLines; ++i, out += 64) {
      if (first_lane == 0) {
        stream_line(out, lines[0][i], lines[1][i]);
      } else {
        put_lanes(out, lines[0][i], std::min(first_lane, kParts));
        put_lanes(out + 32, lines[1][i], std::max<int64_t>(first_lane - kParts, 0));
      }
    }
  }
  for (int64_t part = 0; part < (kIsQ8 ? 1 : 2); ++part) {
    std::byte* out = tile + num_blocks * kBytes + (part * num_blocks + first) * kTile * 2;
    for (int64_t lane = first_lane / kParts * kParts; lane < kTile; lane += kParts) {
      Halves steps[kParts];
      for (int64_t r = 0; r < kParts; ++r) {
        steps[r] = vector_at<Halves>(part == 0 ? rows[lane + r].d : rows[lane + r].m);
      }
      transpose(steps);
      for (int64_t b = 0; b < count; ++b) {
        put_lanes(out + b * kTile * 2 + lane * 2, steps[b], std::max<int64_t>(first_lane - lane, 0));
      }
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
void quantise_codes_q8(const Integers* rows, int64_t num_rows, const BlockDecoder& decoder, Quantised* to) {
  constexpr uint32_t kIq1 = 0xf9, kIq2 = 0x3f;
  switch (decoder.codes) {
    case Codes::q2_k:
      return quantise_codes<Coded<0xf, true, false, true>>(rows, num_rows, *decoder.table, to);
    case Codes::q3_k:
      return quantise_codes<Coded<0xff, false, false>>(rows, num_rows, *decoder.table, to);
    case Codes::iq1_of_16:
      return quantise_codes<Coded<kIq1, true, false>>(rows, num_rows, *decoder.table, to);
    case Codes::iq1_of_32:
      return quantise_codes<Coded<kIq1, true, true>>(rows, num_rows, *decoder.table, to);
    case Codes::iq2_of_16:
      return quantise_codes<Coded<kIq2, true, false>>(rows, num_rows, *decoder.table, to);
    case Codes::iq2_of_32:
      return quantise_codes<Coded<kIq2, true, true>>(rows, num_rows, *decoder.table, to);
    case Codes::iq3_of_32:
      return quantise_codes<Coded<0xffff, true, true>>(rows, num_rows, *decoder.table, to);
    default:
      return quantise_codes<Coded<0xf, true, true>>(rows, num_rows, *decoder.table, to);
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
  if (target == WeightFormat::q8) {
    put_rows<true>(rows, first_lane, first, count, num_blocks, tile);
  } else {
    put_rows<false>(rows, first_lane, first, count, num_blocks, tile);
  }
}

}  // namespace quire
