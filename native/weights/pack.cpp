#include "weights/pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "weights/code_tiles.h"
#include "weights/decode.h"
#include "weights/encode.h"
#include "weights/half.h"
#include "weights/vectors.h"
#include "weights/wide.h"

namespace quire {
namespace {

// That a thread packs before it takes more.
constexpr int64_t kJobBytes = 1 << 18;

// One output of a packed matrix.
struct Lane {
  std::byte* tile;
  int64_t lane;
  int64_t blocks;
};

uint32_t word(const std::byte* p, int64_t index) {
  uint32_t value;
  std::memcpy(&value, p + 4 * index, sizeof value);
  return value;
}
uint16_t half(const std::byte* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
template <typename T>
void put(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

constexpr int64_t block_bytes(WeightFormat target) { return target == WeightFormat::q8 ? 512 : 256; }

void put_word(const Lane& to, WeightFormat target, int64_t block, int64_t index, uint32_t value) {
  put(to.tile + block * block_bytes(target) + index * 64 + to.lane * 4, value);
}
// Where the fp16 scales of all blocks start, and after them the minima.
int64_t scales_at(const Lane& to, WeightFormat target) {
  return to.blocks * (block_bytes(target) + 64 * upper_bits(target));
}
void put_scale(const Lane& to, WeightFormat target, int64_t block, uint16_t d) {
  put(to.tile + scales_at(to, target) + (block * kTile + to.lane) * 2, d);
}
void put_minimum(const Lane& to, WeightFormat target, int64_t block, uint16_t m) {
  put_scale(to, target, to.blocks + block, m);
}

// --- Blocks of integers: the same nibbles and bytes in another order ----------------------------------------------

constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;

// 16 bytes: byte j holds input j in its low half, input j + 16 in its high half.
void copy_nibbles(const Lane& to, WeightFormat target, int64_t block, const std::byte* from) {
  const uint32_t a = word(from, 0), b = word(from, 1), c = word(from, 2), d = word(from, 3);
  put_word(to, target, block, 0, (a & kLow) | ((b & kLow) << 4));
  put_word(to, target, block, 1, (c & kLow) | ((d & kLow) << 4));
  put_word(to, target, block, 2, ((a & kHigh) >> 4) | (b & kHigh));
  put_word(to, target, block, 3, ((c & kHigh) >> 4) | (d & kHigh));
}

void copy_q4_0(const Lane& to, int64_t block, const std::byte* from) {
  put_scale(to, WeightFormat::q4, block, half(from));
  copy_nibbles(to, WeightFormat::q4, block, from + 2);
}

void copy_q4_1(const Lane& to, int64_t block, const std::byte* from) {
  put_scale(to, WeightFormat::q4m, block, half(from));
  put_minimum(to, WeightFormat::q4m, block, half(from + 2));
  copy_nibbles(to, WeightFormat::q4m, block, from + 4);
}

// A scale, for Q5_1 a minimum, the fifth bits of the 32 inputs, then their nibbles.
template <WeightFormat kTarget>
void copy_q5(const Lane& to, int64_t block, const std::byte* from) {
  put_scale(to, kTarget, block, half(from));
  if constexpr (kTarget == WeightFormat::q5m) put_minimum(to, kTarget, block, half(from + 2));
  from += kTarget == WeightFormat::q5m ? 4 : 2;
  uint32_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    // Bits 4 i … 4 i + 3 of the file, one in each byte.
    const uint32_t four = (word(from, 0) >> (4 * i)) & 15u;
    bits |= ((four * 0x00204081u) & 0x01010101u) << i;
  }
  put(to.tile + to.blocks * 256 + block * 64 + to.lane * 4, bits);
  copy_nibbles(to, kTarget, block, from + 4);
}

void copy_q8_0(const Lane& to, int64_t block, const std::byte* from) {
  put_scale(to, WeightFormat::q8, block, half(from));
  for (int64_t i = 0; i < 8; ++i) put_word(to, WeightFormat::q8, block, i, word(from + 2, i) ^ 0x80808080u);
}

// A scale's exponent, then codes.
void copy_mxfp4(const Lane& to, int64_t block, const std::byte* from) {
  put(to.tile + to.blocks * 256 + block * kTile + to.lane, halved(static_cast<uint8_t>(from[0])));
  copy_nibbles(to, WeightFormat::mxfp4, block, from + 1);
}

// --- 256 inputs with scales of scales: the same integers in another order (layouts of the file: ggml-common.h) -------

std::byte* super_of(const Lane& to, WeightFormat target, int64_t block) {
  return to.tile + block / (kSuper / kBlock) * super_layout(target).bytes;
}

// The low four bits of the 32 inputs of block i, which are at 32 bytes from `from` on, in the halves `shift` chooses.
void put_nibbles(const Lane& to, std::byte* super, int64_t i, const std::byte* from, int shift) {
  std::byte* out = super + i * 256 + to.lane * 4;
  for (int64_t j = 0; j < 4; ++j) {
    const uint32_t low = (word(from, 2 * j) >> shift) & kLow, high = (word(from, 2 * j + 1) >> shift) & kLow;
    put(out + j * 64, low | (high << 4));
  }
}

// d, dmin, 12 bytes with eight scales and minima of 6 bits, for Q5_K 32 bytes of which byte l has the fifth bits of
// inputs l of the eight blocks, and 4 times 32 bytes whose low halves are 32 inputs and whose high halves are the next.
template <WeightFormat kTarget>
void copy_q45_k(const Lane& to, int64_t block, const std::byte* from) {
  constexpr SuperLayout layout = super_layout(kTarget);
  std::byte* super = super_of(to, kTarget, block);
  put(super + layout.d + 2 * to.lane, half(from));
  put(super + layout.d + 2 * (kTile + to.lane), half(from + 2));
  const auto* packed = reinterpret_cast<const uint8_t*>(from) + 4;
  for (int64_t i = 0; i < 8; ++i) {
    const int scale = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | ((packed[i - 4] >> 2) & 48);
    const int minimum = i < 4 ? packed[i + 4] & 63 : (packed[i + 4] >> 4) | ((packed[i] >> 2) & 48);
    super[layout.scales + i * kTile + to.lane] = static_cast<std::byte>(scale);
    super[layout.minima + i * kTile + to.lane] = static_cast<std::byte>(minimum);
  }
  from += 16;
  if constexpr (kTarget == WeightFormat::q5k) {
    for (int64_t i = 0; i < 8; ++i) {
      uint32_t bits = 0;
      for (int64_t w = 0; w < 8; ++w) bits |= ((word(from, w) >> i) & 0x01010101u) << w;
      put(super + layout.high + i * 64 + to.lane * 4, bits);
    }
    from += 32;
  }
  for (int64_t i = 0; i < 8; ++i) put_nibbles(to, super, i, from + i / 2 * 32, i % 2 * 4);
}

// d, the upper two bits of eight scales, their lower four bits, then 16 bytes of codes for each.
void copy_iq4_xs(const Lane& to, int64_t block, const std::byte* from) {
  constexpr SuperLayout layout = super_layout(WeightFormat::iq4xs);
  std::byte* super = super_of(to, WeightFormat::iq4xs, block);
  put(super + layout.d + 4 * to.lane, from_f16(half(from)));
  for (int64_t i = 0; i < 8; ++i) {
    const int lower = static_cast<int>(from[4 + i / 2]) >> (i % 2 * 4) & 15, upper = half(from + 2) >> (2 * i) & 3;
    super[layout.scales + i * kTile + to.lane] = static_cast<std::byte>((lower | upper << 4) - 32);
    copy_nibbles({super, to.lane, 0}, WeightFormat::iq4xs, i, from + 8 + 16 * i);
  }
}

// Twice 128 inputs: 64 bytes with the low four bits of inputs l and l + 64, then twice 32 bytes with the upper two bits
// of inputs l, l + 32, l + 64 and l + 96; 16 scales; d.
void copy_q6_k(const Lane& to, int64_t block, const std::byte* from) {
  constexpr SuperLayout layout = super_layout(WeightFormat::q6k);
  std::byte* super = super_of(to, WeightFormat::q6k, block);
  put(super + layout.d + 4 * to.lane, from_f16(half(from + 208)));
  for (int64_t i = 0; i < 16; ++i) super[layout.scales + i * kTile + to.lane] = from[192 + i];
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t part = i / 4, k = i % 4;
    put_nibbles(to, super, i, from + part * 64 + k % 2 * 32, static_cast<int>(k / 2 * 4));
    const std::byte* upper = from + 128 + part * 32;
    for (int64_t line = 0; line < 2; ++line) {
      uint32_t bits = 0;
      for (int64_t w = 0; w < 4; ++w) bits |= ((word(upper, 4 * line + w) >> (2 * k)) & 0x03030303u) << (2 * w);
      put(super + layout.high + i * 128 + line * 64 + to.lane * 4, bits);
    }
  }
}

// --- Floats -------------------------------------------------------------------------------------------------------

QUIRE_WIDE
void decode_floats(WeightFormat stored, const std::byte* from, int64_t count, float* out) {
  if (stored == WeightFormat::f32) {
    std::memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
  } else if (stored == WeightFormat::bf16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(half(from + 2 * i));
  } else {
    decode_f16(from, count, out);
  }
}

// Halves of the target's own kind: decoding and rounding f16 would take three times as long.
void copy_halves(const Lane& to, WeightFormat target, int64_t first, int64_t count, const std::byte* from) {
  if (target == WeightFormat::f16) {
    std::byte* out = to.tile + (first * kTile + to.lane) * 2;
    for (int64_t i = 0; i < count; ++i) put(out + i * kTile * 2, half(from + 2 * i));
    return;
  }
  std::byte* out = to.tile + (first / 2 * kTile + to.lane) * 4;
  for (int64_t i = 0; i < count / 2; ++i) put(out + i * kTile * 4, word(from, i));
  if (count % 2) put(out + count / 2 * kTile * 4, uint32_t{half(from + 2 * (count - 1))});
}

void encode_floats(const Lane& to, WeightFormat target, int64_t first, int64_t count, const float* values) {
  if (target == WeightFormat::f32) {
    for (int64_t i = 0; i < count; ++i) put(to.tile + ((first + i) * kTile + to.lane) * 4, values[i]);
  } else if (target == WeightFormat::f16) {
    for (int64_t i = 0; i < count; ++i) put(to.tile + ((first + i) * kTile + to.lane) * 2, round_to_f16(values[i]));
  } else if (target == WeightFormat::bf16) {
    for (int64_t i = 0; i < count; i += 2) {
      const uint32_t low = round_to_bf16(values[i]), high = i + 1 < count ? round_to_bf16(values[i + 1]) : 0;
      put(to.tile + ((first + i) / 2 * kTile + to.lane) * 4, low | (high << 16));
    }
  }
}

// --- Rows ---------------------------------------------------------------------------------------------------------

using CopyBlock = void (*)(const Lane& to, int64_t block, const std::byte* from);
template <CopyBlock kCopy, int64_t kInputs, int64_t kBytes>
void copy_blocks(const Lane& to, int64_t first, int64_t count, const std::byte* from) {
  for (int64_t i = 0; i < count; i += kInputs) kCopy(to, (first + i) / kBlock, from + i / kInputs * kBytes);
}

// A format of rows, and how they are packed: as `target` without decoding, else from the decoded values.
struct Stored {
  const char* name;
  int64_t inputs, bytes;  // of a block
  WeightFormat target;
  void (*copy)(const Lane& to, int64_t first, int64_t count, const std::byte* from);  // null for floats and codes
  const BlockDecoder* decoder = nullptr;

  bool is_coded() const { return bytes == inputs; }  // CODES
  bool is_float() const { return copy == nullptr && decoder == nullptr && !is_coded(); }
  bool copies_to(WeightFormat format) const { return copy != nullptr && target == format; }
};
template <CopyBlock kCopy, int64_t kInputs, int64_t kBytes>
constexpr Stored blocks(const char* name, WeightFormat target) {
  return {name, kInputs, kBytes, target, copy_blocks<kCopy, kInputs, kBytes>, nullptr};
}
constexpr Stored kStored[] = {
    {"F32", 1, 4, WeightFormat::f32, nullptr},
    {"F16", 1, 2, WeightFormat::f16, nullptr},
    {"BF16", 1, 2, WeightFormat::bf16, nullptr},
    {"CODES", 1, 1, WeightFormat::f32, nullptr},
    blocks<copy_q4_0, 32, 18>("Q4_0", WeightFormat::q4),
    blocks<copy_q4_1, 32, 20>("Q4_1", WeightFormat::q4m),
    blocks<copy_q5<WeightFormat::q5>, 32, 22>("Q5_0", WeightFormat::q5),
    blocks<copy_q5<WeightFormat::q5m>, 32, 24>("Q5_1", WeightFormat::q5m),
    blocks<copy_q8_0, 32, 34>("Q8_0", WeightFormat::q8),
    blocks<copy_q45_k<WeightFormat::q4k>, 256, 144>("Q4_K", WeightFormat::q4k),
    blocks<copy_q45_k<WeightFormat::q5k>, 256, 176>("Q5_K", WeightFormat::q5k),
    blocks<copy_q6_k, 256, 210>("Q6_K", WeightFormat::q6k),
    blocks<copy_q4_0, 32, 18>("IQ4_NL", WeightFormat::iq4nl),
    blocks<copy_iq4_xs, 256, 136>("IQ4_XS", WeightFormat::iq4xs),
    blocks<copy_mxfp4, 32, 17>("MXFP4", WeightFormat::mxfp4),
};

Stored find_stored(const std::string& name) {
  const BlockDecoder* decoder = find_decoder(name.c_str());
  for (Stored stored : kStored) {
    stored.decoder = decoder;
    if (name == stored.name) return stored;
  }
  if (decoder != nullptr) return {decoder->name, decoder->inputs, decoder->bytes, WeightFormat::f32, nullptr, decoder};
  throw std::invalid_argument("weights stored as " + name + " are not packed natively: decode them to F32 first");
}

// Inputs first … first + count - 1 of a tile's outputs from `first_lane` on; those from end_lane on become zero.
struct Chunk {
  std::byte* tile;
  int64_t first_lane, end_lane;
  int64_t blocks;  // of a row
  int64_t first, count;
  int64_t first_byte, num_bytes;        // of a stored row
  int64_t rows[kTile];                  // in the file, by lane
  uint8_t codes[kTile][kInputsAtOnce];  // of CODES, by lane
  float scales[kTile];                  // of rows that are rounded to E4M3
};

const std::byte* stored_at(const PackedRows& job, const Chunk& chunk, int64_t lane) {
  return job.rows + chunk.rows[lane] * job.row_stride_bytes + chunk.first_byte;
}

void decode(const PackedRows& job, const Stored& stored, const Chunk& chunk, int64_t lane, int64_t output,
            float* values) {
  const CodedRows& codes = job.codes;
  if (stored.is_coded()) {
    const int64_t at = (output - job.first_output) * codes.num_groups;
    decode_codes(codes.table, codes.scales + at, codes.zeros + at, codes.groups + chunk.first, chunk.codes[lane],
                 chunk.count, values);
  } else if (stored.decoder != nullptr) {
    decode_blocks(*stored.decoder, stored_at(job, chunk, lane), chunk.count, job.codebook, values);
  } else {
    decode_floats(stored.target, stored_at(job, chunk, lane), chunk.count, values);
    if (job.whole_inputs > 0) round_to_e4m3(values, chunk.count, chunk.scales[lane]);
  }
}

// What the codes of E4M3 are multiplied with, for a whole row.
float e4m3_scale(const PackedRows& job, const Stored& stored, int64_t row) {
  const std::byte* from = job.rows + row * job.row_stride_bytes - job.first_input * stored.bytes;
  float values[kInputsAtOnce], largest = 0.0f;
  for (int64_t i = 0; i < job.whole_inputs; i += kInputsAtOnce) {
    const int64_t count = std::min(kInputsAtOnce, job.whole_inputs - i);
    decode_floats(stored.target, from + i * stored.bytes, count, values);
    largest = largest_magnitude(values, count, largest);
  }
  return largest / 448.0f;
}

void quantise(const PackedRows& job, const Stored& stored, const Chunk& chunk, int64_t lane, int64_t output,
              Quantised& to) {
  const bool is_q8 = job.target == WeightFormat::q8;
  if (lane >= chunk.end_lane) {
    to = {};
    std::memset(to.u, is_q8 ? 128 : 0, sizeof to.u);
  } else {
    float values[kInputsAtOnce];
    decode(job, stored, chunk, lane, output, values);
    (is_q8 ? quantise_q8 : quantise_q4m)(values, chunk.count / kBlock, to);
  }
}

constexpr float kZeros[kInputsAtOnce] = {};

void pack_lane(const PackedRows& job, const Stored& stored, const Chunk& chunk, int64_t lane, int64_t output) {
  const Lane to{chunk.tile, lane, chunk.blocks};
  const WeightFormat target = job.target;
  const bool is_zero = lane >= chunk.end_lane;
  const std::byte* from = is_zero ? reinterpret_cast<const std::byte*>(kZeros) : stored_at(job, chunk, lane);
  if (stored.copies_to(target)) return stored.copy(to, chunk.first, chunk.count, from);
  const bool is_half = stored.target == WeightFormat::f16 || stored.target == WeightFormat::bf16;
  if (is_half && stored.is_float() && stored.target == target) {
    return copy_halves(to, target, chunk.first, chunk.count, from);
  }
  if (is_zero) return encode_floats(to, target, chunk.first, chunk.count, kZeros);
  float values[kInputsAtOnce];
  decode(job, stored, chunk, lane, output, values);
  encode_floats(to, target, chunk.first, chunk.count, values);
}

void check(const PackedRows& job, const Stored& stored) {
  const bool is_encodable =
      wanted_rows(job.target) != RowType::q8 || job.target == WeightFormat::q8 || job.target == WeightFormat::q4m;
  const bool is_decoded = stored.copy == nullptr || stored.decoder != nullptr;
  if (!stored.copies_to(job.target) && !job.codes.is_direct && !(is_decoded && is_encodable)) {
    throw std::invalid_argument("these stored weights cannot be packed as the target format");
  }
  const int64_t target_block = wanted_rows(job.target) == RowType::q8 ? kBlock : 1;
  if (job.num_inputs % std::max(stored.inputs, target_block) != 0) {
    throw std::invalid_argument("a row's inputs are not a whole number of blocks");
  }
  if (job.whole_inputs > 0 && (!stored.is_float() || job.whole_inputs % kBlock != 0)) {
    throw std::invalid_argument("only rows of floats, of whole blocks, are rounded to E4M3");
  }
  if (stored.is_coded() != (job.codes.stored.data != nullptr)) {
    throw std::invalid_argument("rows of codes, and no others, need codes");
  }
  if (job.stored.starts_with("IQ") && stored.copy == nullptr && job.codebook == nullptr) {
    throw std::invalid_argument("weights stored as " + job.stored + " need their codebook");
  }
}

void pack_piece(const PackedRows& job, const Stored& stored) {
  const int64_t bytes = tile_bytes(job.target, job.num_inputs), end = job.first_output + job.num_rows;
  const bool is_quantised = !stored.copies_to(job.target) && wanted_rows(job.target) == RowType::q8;
  const bool has_codes =
      job.target == WeightFormat::q8 && stored.decoder != nullptr && stored.decoder->codes != Codes::none;
  const bool is_by_lanes = stored.is_coded() && (job.codes.is_direct || job.target == WeightFormat::q8);
  Integers integers[kTile] = {};
  Chunk chunk;
  chunk.blocks = job.num_inputs / kBlock;
  for (int64_t output = job.first_output; output < end; output = (output / kTile + 1) * kTile) {
    chunk.tile = job.packed + output / kTile * bytes;
    chunk.first_lane = output % kTile;
    chunk.end_lane = std::min(kTile - 0L, end - output / kTile * kTile);
    const int64_t before = output - chunk.first_lane;
    for (int64_t lane = chunk.first_lane; lane < chunk.end_lane; ++lane) {
      const int64_t r = before + lane - job.first_output;
      chunk.rows[lane] = job.codes.first_row + (job.row_order == nullptr ? r : job.row_order[r]);
      if (job.whole_inputs > 0) chunk.scales[lane] = e4m3_scale(job, stored, chunk.rows[lane]);
    }
    if (is_by_lanes) {
      CodeTile tile{chunk.tile, chunk.blocks, chunk.first_lane, chunk.end_lane, {}, output - job.first_output};
      std::copy_n(chunk.rows, kTile, tile.rows);
      pack_codes(job, tile);
      continue;
    }
    for (chunk.first = 0; chunk.first < job.num_inputs; chunk.first += kInputsAtOnce) {
      chunk.count = std::min(kInputsAtOnce, job.num_inputs - chunk.first);
      chunk.first_byte = chunk.first / stored.inputs * stored.bytes;
      chunk.num_bytes = stored.is_coded() ? 0 : chunk.count / stored.inputs * stored.bytes;
      if (stored.is_coded()) {
        unpack_codes(job.codes.stored, chunk.rows + chunk.first_lane, chunk.end_lane - chunk.first_lane,
                     job.codes.first_column + chunk.first, chunk.count, chunk.codes[chunk.first_lane], kInputsAtOnce);
      }
      Quantised rows[kTile];
      for (int64_t lane = chunk.first_lane; lane < kTile; ++lane) {
        // The processor does not foresee the jumps from row to row: without this, packing took twice the time (Zen 3).
        // Behind the end of a row comes that of the next tile.
        const bool is_last = chunk.first + chunk.count == job.num_inputs;
        const std::byte* next =
            stored_at(job, chunk, lane) + (is_last ? kTile * job.row_stride_bytes - chunk.first_byte : chunk.num_bytes);
        for (int64_t i = 0; lane < chunk.end_lane && i < chunk.num_bytes; i += 64) __builtin_prefetch(next + i);
        if (has_codes && lane < chunk.end_lane) {
          stored.decoder->decode(stored_at(job, chunk, lane), job.codebook, integers[lane]);
        } else if (is_quantised) {
          quantise(job, stored, chunk, lane, before + lane, rows[lane]);
        } else {
          pack_lane(job, stored, chunk, lane, before + lane);
        }
      }
      if (has_codes) {
        quantise_codes_q8(integers + chunk.first_lane, chunk.end_lane - chunk.first_lane, *stored.decoder,
                          rows + chunk.first_lane);
      }
      if (is_quantised) {
        put_rows(rows, chunk.first_lane, job.target, chunk.first / kBlock, chunk.count / kBlock, chunk.blocks,
                 chunk.tile);
      }
    }
  }
}

// Adds the pieces of a job, which end where tiles end.
void cut(const PackedRows& job, std::vector<PackedRows>& pieces) {
  const bool is_coded = job.codes.stored.data != nullptr;
  const int64_t bytes = tile_bytes(job.target, job.num_inputs), outputs = (1 + kJobBytes / bytes) * kTile;
  for (int64_t first = 0; first < job.num_rows;) {
    PackedRows piece = job;
    piece.first_output += first;
    piece.num_rows = std::min(job.num_rows - first, outputs - piece.first_output % kTile);
    if (is_coded) {
      piece.codes.scales += first * job.codes.num_groups;
      piece.codes.zeros += first * job.codes.num_groups;
    }
    if (job.row_order == nullptr) {
      piece.rows += first * job.row_stride_bytes;
      piece.codes.first_row += is_coded ? first : 0;
    } else {
      piece.row_order += first;
    }
    first += piece.num_rows;
    pieces.push_back(std::move(piece));
  }
}

// The same piece with AWQ's words one behind the other in `memory`. A line of the file has words of 128 outputs, and
// lines of neighbouring inputs are a power of two apart: no cache would hold them until the next tile needs them.
PackedRows gather_words(const PackedRows& piece, std::vector<std::byte>& memory) {
  PackedRows gathered = piece;
  StoredCodes& stored = gathered.codes.stored;
  if (stored.data == nullptr || stored.layout != CodeLayout::awq || piece.row_order != nullptr) return gathered;
  const int64_t first = piece.codes.first_row / 8, last = (piece.codes.first_row + piece.num_rows - 1) / 8;
  const int64_t bytes = (last - first + 1) * 4, ahead = 16 * stored.stride_bytes;
  memory.resize(piece.num_inputs * bytes);
  for (int64_t i = 0; i < piece.num_inputs; ++i) {
    const std::byte* from = stored.data + (piece.codes.first_column + i) * stored.stride_bytes + first * 4;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + ahead + at);
    std::memcpy(memory.data() + i * bytes, from, bytes);
  }
  stored.data = memory.data();
  stored.stride_bytes = bytes;
  gathered.codes.first_column = 0;
  gathered.codes.first_row -= 8 * first;
  return gathered;
}

// Pieces that share no tile, on num_threads threads.
void pack_pieces(const std::vector<PackedRows>& pieces, int num_threads) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::vector<std::byte> memory;
    for (size_t i; (i = next.fetch_add(1)) < pieces.size();) {
      pack_piece(gather_words(pieces[i], memory), find_stored(pieces[i].stored));
    }
    finish_lines();
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min<size_t>(num_threads, pieces.size()); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void pack_rows(const std::vector<PackedRows>& jobs, int num_threads) {
  for (const PackedRows& job : jobs) check(job, find_stored(job.stored));
  std::vector<PackedRows> pieces;
  for (const PackedRows& job : jobs) {
    // Another job may have written the first outputs of this one's first tile, and zeros after them.
    if (job.first_output % kTile != 0) {
      pack_pieces(pieces, num_threads);
      pieces.clear();
    }
    cut(job, pieces);
  }
  pack_pieces(pieces, num_threads);
}

}  // namespace quire
