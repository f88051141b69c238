#include "weights/code_tiles.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "weights/half.h"
#include "weights/vectors.h"
#include "weights/wide.h"

namespace quire {
namespace {

// Bytes of a row, and rows of words, that are fetched ahead: the processor does not foresee jumps from row to row.
constexpr int64_t kBytesAhead = 256, kRowsAhead = 16;

// What codes stand for, as this can be computed: themselves, as bytes with or without a sign, floats of 8 bits, or
// entries of the table.
enum class Meaning { unsigned_byte, signed_byte, e4m3, entry };

// Below 2^-6, multiples of 2^-9; of 127 and 255, NaN.
[[gnu::always_inline]] inline Floats from_e4m3(Words code) {
  const Words sign = (code & 128) << 24, fraction = (code & 127) << 20, zero = {}, least = zero + 0x3c800000;
  const Words small = same_bits<Words>(same_bits<Floats>(fraction | least) - same_bits<Floats>(least));
  const Words magnitude = fraction < 0x00800000 ? small : fraction + 0x3c000000;
  return same_bits<Floats>(sign | (fraction == 0x07f00000 ? zero + 0x7fc00000 : magnitude));
}

Meaning meaning_of(const float* table, int num_codes) {
  bool is_unsigned = true, is_signed = true, is_e4m3 = num_codes == 256;
  for (int code = 0; code < num_codes; ++code) {
    const float value = from_e4m3(Words{} + code)[0];
    is_e4m3 &= table[code] == value || (table[code] != table[code] && value != value);
    is_unsigned &= table[code] == static_cast<float>(code);
    is_signed &= table[code] == static_cast<float>(static_cast<int8_t>(code));
  }
  return is_unsigned ? Meaning::unsigned_byte
         : is_signed ? Meaning::signed_byte
         : is_e4m3   ? Meaning::e4m3
                     : Meaning::entry;
}

// Eight outputs of a tile.
struct Lanes {
  const int64_t* rows;
  bool are_neighbours;          // of one another in the file
  bool are_in_word;             // of awq
  Words word_shifts;            // of awq
  int64_t kept;                 // lanes that belong to other jobs
  Words is_valid;               // all bits set, or none where an output becomes zero
  const float *scales, *zeros;  // of each group those of the lanes
};

[[gnu::always_inline]] inline Words words_at(Bytes from, const Lanes& lanes) {
  if (lanes.are_neighbours) return vector_at<Words>(from + 4 * lanes.rows[0]);
  uint32_t words[kParts];
  for (int64_t l = 0; l < kParts; ++l) words[l] = read_word(from + 4 * lanes.rows[l]);
  return vector_at<Words>(words);
}

template <bool kAreInWord>
[[gnu::always_inline]] inline Words awq_words(Bytes from, const Lanes& lanes) {
  if constexpr (kAreInWord) return Words{} + static_cast<int32_t>(read_word(from + lanes.rows[0] / 8 * 4));
  uint32_t words[kParts];
  for (int64_t l = 0; l < kParts; ++l) words[l] = read_word(from + lanes.rows[l] / 8 * 4);
  return vector_at<Words>(words);
}

// Four lines of eight inputs each.
template <bool kAreInWord>
[[gnu::always_inline]] inline void awq_lines(Bytes from, int64_t stride, const Lanes& lanes, Words* lines) {
  for (int64_t i = 0; i < 4; ++i) {
    Words line = {};
#pragma GCC unroll 8
    for (int32_t j = 0; j < 8; ++j, from += stride) {
      line |= (awq_words<kAreInWord>(from, lanes) >> lanes.word_shifts & 15) << (8 * (j % 4) + 4 * (j / 4));
    }
    lines[i] = line;
  }
}

// Eight codes of 4 bits, the lowest first, in the order of the packed formats: byte j has codes j and, above it, j + 4.
[[gnu::always_inline]] inline Words in_packed_order(Words word) {
  Words low = word & 0xffff, high = (word >> 16) & 0xffff;
  low = (low | low << 8) & 0x00ff00ff;
  high = (high | high << 8) & 0x00ff00ff;
  return ((low | low << 4) & 0x0f0f0f0f) | ((high | high << 4) & 0x0f0f0f0f) << 4;
}

// The lines of a block of 32 inputs from `column` on: of 8 bits eight of four inputs each, of 4 bits four of eight.
[[gnu::always_inline]] inline void read_block(const StoredCodes& from, const Lanes& lanes, int64_t column,
                                              Words* lines) {
  const auto data = reinterpret_cast<Bytes>(from.data);
  const int64_t stride = from.stride_bytes;
  if (from.layout == CodeLayout::down4 || from.layout == CodeLayout::down8) {
    const bool is_byte = from.layout == CodeLayout::down8;
    const Bytes words = data + column / (is_byte ? 4 : 8) * stride;
    for (int64_t i = 0; i < (is_byte ? 8 : 4); ++i) {
      __builtin_prefetch(words + (i + kRowsAhead) * stride + 4 * lanes.rows[0]);
      const Words word = words_at(words + i * stride, lanes);
      lines[i] = is_byte ? word : in_packed_order(word);
    }
    return;
  }
  if (from.layout == CodeLayout::awq) {
    const Bytes words = data + column * stride;
    return lanes.are_in_word ? awq_lines<true>(words, stride, lanes, lines)
                             : awq_lines<false>(words, stride, lanes, lines);
  }
  const bool is_byte = from.layout == CodeLayout::across8, is_nvfp4 = from.layout == CodeLayout::nvfp4;
  const int64_t first = is_byte ? column : is_nvfp4 ? column / 64 * 36 + 4 + column % 64 / 2 : column / 2;
  Bytes rows[kParts];
  for (int64_t l = 0; l < kParts; ++l) {
    rows[l] = data + lanes.rows[l] * stride + first;
    __builtin_prefetch(rows[l] + kBytesAhead);
  }
  if (is_byte) {
    four_words(rows, lines);
    for (Bytes& row : rows) row += 16;
    return four_words(rows, lines + 4);
  }
  Words words[4];
  four_words(rows, words);
  for (int i = 0; i < 4; ++i) {
    if (!is_nvfp4) {
      lines[i] = in_packed_order(words[i]);
      continue;
    }
    // Byte j of 8 has input j and, above it, j + 8.
    const Words a = words[i / 2 * 2], b = words[i / 2 * 2 + 1];
    lines[i] = i % 2 == 0 ? (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4 : (a >> 4 & 0x0f0f0f0f) | (b & ~0x0f0f0f0f);
  }
}

// The 32 values of a block in all lanes, from its lines of codes. Loops over lines, as all of this file, are unrolled:
// GCC leaves them alone, and shifts by variables and the choice of the meaning then took half of the time.
template <bool kIsByte, typename Meant>
[[gnu::always_inline]] inline void decode_lines(const Words* lines, Meant meant, Floats* values) {
  constexpr int32_t kEach = kIsByte ? 4 : 8;
  for (int64_t i = 0; i < kBlock / kEach; ++i, values += kEach) {
#pragma GCC unroll 8
    for (int32_t k = 0; k < kEach; ++k) {
      values[k] = meant(lines[i] >> (8 * (k % 4) + 4 * (k / 4)) & (kIsByte ? 255 : 15));
    }
  }
}

template <bool kIsByte>
[[gnu::always_inline]] inline void decode_block(const Words* lines, Meaning meaning, const float* table,
                                                Floats* values) {
  if (meaning == Meaning::unsigned_byte) {
    decode_lines<kIsByte>(lines, [](Words code) { return __builtin_convertvector(code, Floats); }, values);
  } else if (meaning == Meaning::signed_byte) {
    const auto signed_byte = [](Words code) { return __builtin_convertvector((code ^ 128) - 128, Floats); };
    decode_lines<kIsByte>(lines, signed_byte, values);
  } else if (meaning == Meaning::e4m3) {
    decode_lines<kIsByte>(lines, [](Words code) { return from_e4m3(code); }, values);
  } else {
    const auto entries_of = [table](Words code) {
      float entries[kParts];
      for (int64_t l = 0; l < kParts; ++l) entries[l] = table[code[l]];
      return floats_at(entries);
    };
    decode_lines<kIsByte>(lines, entries_of, values);
  }
}

// The lines of a block as q8, and its steps.
template <bool kIsByte>
[[gnu::always_inline]] inline void quantise_block(const Words* lines, const CodedRows& codes, Meaning meaning,
                                                  const Lanes& lanes, const int32_t* groups, Words* out, uint16_t* d) {
  Floats values[kBlock];
  Words high = {};  // the bits of magnitudes are ordered as they are
  decode_block<kIsByte>(lines, meaning, codes.table, values);
#pragma GCC unroll 4
  for (int64_t k = 0; k < kBlock; ++k) {
    const Floats zero = floats_at(lanes.zeros + kParts * groups[k]);
    const Floats value = (values[k] - zero) * floats_at(lanes.scales + kParts * groups[k]);
    const Words magnitude = same_bits<Words>(value) & 0x7fffffff;
    high = magnitude > high ? magnitude : high;
    values[k] = value;
  }
  float inverses[kParts];
  high |= high >= 0x7f800000;  // NaN where a value is not finite
  put_steps(same_bits<Floats>(high & lanes.is_valid) / 127.0f, d, inverses);
  const Floats inverse = floats_at(inverses);
  if (are_bytes(same_bits<Floats>(high), inverse)) {
    for (int64_t i = 0; i < kBlock / 4; ++i) out[i] = four_bytes<false>(values + 4 * i, inverse);
  } else {
    for (int64_t i = 0; i < kBlock / 4; ++i) out[i] = four_bytes<true>(values + 4 * i, inverse);
  }
}

// Of each group the scales and zeros of eight outputs, and fp16's d and m of direct codes.
struct Groups {
  std::vector<float> scales, zeros;
  std::vector<uint16_t> d, m;
};

Groups read_groups(const CodedRows& codes, const CodeTile& to, int64_t lane) {
  const int64_t count = codes.num_groups;
  Groups groups;
  groups.d.resize(kParts * count);
  groups.m.resize(kParts * count);
  groups.scales.resize(kParts * count);
  groups.zeros.resize(kParts * count);
  for (int64_t l = 0; l < kParts; ++l) {
    if (lane + l < to.first_lane || lane + l >= to.end_lane) continue;
    const int64_t first = (to.first_row + lane + l - to.first_lane) * count;
    for (int64_t g = 0; g < count; ++g) {
      const float scale = codes.scales[first + g], zero = codes.zeros[first + g];
      groups.scales[g * kParts + l] = scale;
      groups.zeros[g * kParts + l] = zero;
      groups.d[g * kParts + l] = round_to_f16(scale);
      groups.m[g * kParts + l] = round_to_f16(-zero * scale);
    }
  }
  return groups;
}

QUIRE_WIDE
void pack_lanes(const PackedRows& job, const CodeTile& to, const Lanes& lanes, const Groups& groups, int64_t lane) {
  const CodedRows& codes = job.codes;
  const bool is_byte = codes.stored.layout == CodeLayout::across8 || codes.stored.layout == CodeLayout::down8;
  const bool is_q8 = job.target == WeightFormat::q8, has_halves = codes.block_scales.data == nullptr;
  const int64_t num_lines = is_q8 ? 8 : 4;
  std::byte* scales = to.tile + to.num_blocks * num_lines * 64 + 2 * lane;
  const Meaning meaning = codes.is_direct ? Meaning::entry : meaning_of(codes.table, is_byte ? 256 : 16);
  const Words flipped = Words{} + static_cast<int32_t>(codes.flipped * 0x01010101u);
  const Words blank = Words{} + static_cast<int32_t>(is_q8 ? 0x80808080u : 0u);
  for (int64_t b = 0; b < to.num_blocks; ++b) {
    Words stored[8], lines[8];
    uint16_t steps[kParts];
    const int32_t* of_columns = codes.groups + b * kBlock;
    read_block(codes.stored, lanes, codes.first_column + b * kBlock, stored);
    if (codes.is_direct) {
      for (int64_t i = 0; i < num_lines; ++i) lines[i] = stored[i] ^ flipped;
    } else if (is_byte) {
      quantise_block<true>(stored, codes, meaning, lanes, of_columns, lines, steps);
    } else {
      quantise_block<false>(stored, codes, meaning, lanes, of_columns, lines, steps);
    }
    for (int64_t i = 0; i < num_lines; ++i) {
      const Words line = (lines[i] & lanes.is_valid) | (blank & ~lanes.is_valid);
      put_lanes(to.tile + (b * num_lines + i) * 64 + 4 * lane, line, lanes.kept);
    }
    if (!has_halves) continue;
    const int64_t group = codes.is_direct ? kParts * of_columns[0] : 0;
    put_lanes(scales + b * 2 * kTile, vector_at<Halves>(codes.is_direct ? groups.d.data() + group : steps), lanes.kept);
    if (job.target == WeightFormat::q4m) {
      put_lanes(scales + (to.num_blocks + b) * 2 * kTile, vector_at<Halves>(groups.m.data() + group), lanes.kept);
    }
  }
}

// Scales of a byte, of mxfp4 one for each block, of nvfp4 two, and nvfp4's factor.
void put_block_scales(const PackedRows& job, const CodeTile& to) {
  const bool is_mxfp4 = job.target == WeightFormat::mxfp4;
  const int64_t group = is_mxfp4 ? 32 : 16, count = to.num_blocks * kBlock / group;
  std::byte* scales = to.tile + to.num_blocks * 256;
  std::vector<uint8_t> of_row(count);
  for (int64_t lane = to.first_lane; lane < kTile; ++lane) {
    if (lane < to.end_lane) {
      unpack_codes(job.codes.block_scales, to.rows + lane, 1, job.codes.first_column / group, count, of_row.data(), 0);
      if (!is_mxfp4) std::memcpy(scales + count * kTile + lane * 4, &job.codes.factor, sizeof job.codes.factor);
    } else {
      std::fill(of_row.begin(), of_row.end(), 0);
    }
    for (int64_t i = 0; i < count; ++i) {
      scales[i * kTile + lane] = static_cast<std::byte>(is_mxfp4 ? halved(of_row[i]) : of_row[i]);
    }
  }
}

}  // namespace

void pack_codes(const PackedRows& job, const CodeTile& to) {
  for (int64_t lane = to.first_lane / kParts * kParts; lane < kTile; lane += kParts) {
    constexpr int32_t kShifts[kParts] = {0, 16, 4, 20, 8, 24, 12, 28};
    int64_t rows[kParts];
    Lanes lanes{};
    lanes.rows = rows;
    lanes.kept = std::max<int64_t>(to.first_lane - lane, 0);
    lanes.are_neighbours = true;
    for (int64_t l = 0; l < kParts; ++l) {
      // Outputs that are not of this job read the rows of one that is.
      rows[l] = to.rows[std::clamp(lane + l, to.first_lane, to.end_lane - 1)];
      lanes.are_neighbours = lanes.are_neighbours && rows[l] == rows[0] + l;
      lanes.word_shifts[l] = kShifts[rows[l] % 8];
      lanes.is_valid[l] = lane + l < to.end_lane ? -1 : 0;
    }
    lanes.are_in_word = std::all_of(rows, rows + kParts, [&](int64_t row) { return row / 8 == rows[0] / 8; });
    const Groups groups = job.codes.block_scales.data == nullptr ? read_groups(job.codes, to, lane) : Groups{};
    lanes.scales = groups.scales.data();
    lanes.zeros = groups.zeros.data();
    pack_lanes(job, to, lanes, groups, lane);
  }
  if (job.codes.block_scales.data != nullptr) put_block_scales(job, to);
}

}  // namespace quire
