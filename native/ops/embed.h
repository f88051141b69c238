// Rows of a table that is packed like any weight: the head of a model with tied embeddings is stored once.
#pragma once
#include "isa/simd.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out[t] = table[id[t] + offset], or += ; ids are the step's token ids or its positions. Rows that the table does not
// have, since other ranks hold them, are zeros.
struct EmbedOp {
  Weight table;
  Rows out;  // f32
  int64_t offset;
  bool of_positions;
  bool add;
};

namespace {

inline float half_to_float(uint16_t bits) {
  uint16_t padded[kLanes] = {bits};
  float values[kLanes];
  store(values, widen_f16(padded));
  return values[0];
}

// The 32 numbers u of block `block` of one output.
inline void unpack_nibbles(const uint8_t* tile, int64_t lane, int64_t block, int32_t* u) {
  for (int j = 0; j < 4; ++j) {
    const uint8_t* pairs = tile + block * 256 + j * 64 + lane * 4;
    for (int i = 0; i < 4; ++i) {
      u[8 * j + i] = pairs[i] & 15;
      u[8 * j + 4 + i] = pairs[i] >> 4;
    }
  }
}
inline void unpack_bytes(const uint8_t* tile, int64_t lane, int64_t block, int32_t* u) {
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i) u[4 * j + i] = tile[block * 512 + j * 64 + lane * 4 + i];
  }
}

// values = d * (u - centre), then + m if it is given: two roundings, as GGUF's formats are defined.
inline void scale_block(const int32_t* u, int32_t centre, float d, const float* m, float* values) {
  for (int i = 0; i < kBlock; i += kLanes) {
    F32x16 value = broadcast(d) * to_float(load(u + i) - broadcast(centre));
    if (m != nullptr) value = value + broadcast(*m);
    store(values + i, value);
  }
}

// The 32 numbers of block `block` of one output of a format with scales of scales, and the values they stand for.
inline void decode_super(WeightFormat format, const std::byte* tile, int64_t lane, int64_t block, float* values) {
  const SuperLayout at = super_layout(format);
  const std::byte* super = tile + block / (kSuper / kBlock) * at.bytes;
  const int64_t i = block % (kSuper / kBlock);
  int32_t u[kBlock];
  unpack_nibbles(reinterpret_cast<const uint8_t*>(super), lane, i, u);
  const auto* high = reinterpret_cast<const uint8_t*>(super + at.high);
  for (int n = 0; n < kBlock && format != WeightFormat::q4k; ++n) {
    const int chunk = n / 8, byte = static_cast<int>(lane) * 4 + n % 4, odd = n / 4 % 2;
    u[n] |= format == WeightFormat::q5k
                ? (high[i * 64 + byte] >> (2 * chunk + odd) & 1) << 4
                : (high[i * 128 + chunk / 2 * 64 + byte] >> (4 * (chunk % 2) + 2 * odd) & 3) << 4;
  }
  const auto* scales = reinterpret_cast<const uint8_t*>(super + at.scales);
  if (format == WeightFormat::q6k) {
    const float d = reinterpret_cast<const float*>(super + at.d)[lane];
    for (int n = 0; n < kBlock; n += kLanes) {
      const auto scale = static_cast<int8_t>(scales[(2 * i + n / kLanes) * kTile + lane]);
      store(values + n, broadcast(d * static_cast<float>(scale)) * to_float(load(u + n) - broadcast(32)));
    }
    return;
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(super + at.d);
  const auto* minima = reinterpret_cast<const uint8_t*>(super + at.minima);
  const float m = half_to_float(halves[kTile + lane]) * -static_cast<float>(minima[i * kTile + lane]);
  const float d = half_to_float(halves[lane]) * static_cast<float>(scales[i * kTile + lane]);
  scale_block(u, 0, d, &m, values);
}

// Inputs first … first + count - 1 of output `lane` of a packed tile, as fp32. At most 32, from a multiple of 32 on;
// values past the last are anything.
inline void decode(const Weight& table, const std::byte* tile, int64_t lane, int64_t first, int64_t count,
                   float* values) {
  const int64_t blocks = table.num_inputs / kBlock, block = first / kBlock;
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  const auto* halves = reinterpret_cast<const uint16_t*>(tile);
  int32_t u[kBlock];
  uint16_t few[kBlock] = {};
  switch (table.format) {
    case WeightFormat::f32:
      for (int64_t i = 0; i < count; ++i) values[i] = reinterpret_cast<const float*>(tile)[(first + i) * kTile + lane];
      return;
    case WeightFormat::f16:
      for (int64_t i = 0; i < count; ++i) few[i] = halves[(first + i) * kTile + lane];
      store(values, widen_f16(few));
      store(values + kLanes, widen_f16(few + kLanes));
      return;
    case WeightFormat::bf16:
      for (int64_t i = 0; i < count; ++i) few[i] = halves[((first + i) / 2 * kTile + lane) * 2 + i % 2];
      store(values, widen_bf16(few));
      store(values + kLanes, widen_bf16(few + kLanes));
      return;
    case WeightFormat::q4:
    case WeightFormat::q4m: {
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + blocks * 256) + block * kTile + lane;
      const bool has_minima = table.format == WeightFormat::q4m;
      const float m = has_minima ? half_to_float(scales[blocks * kTile]) : 0.0f;
      unpack_nibbles(bytes, lane, block, u);
      scale_block(u, has_minima ? 0 : 8, half_to_float(*scales), has_minima ? &m : nullptr, values);
      return;
    }
    case WeightFormat::q8: {
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + blocks * 512) + block * kTile + lane;
      unpack_bytes(bytes, lane, block, u);
      scale_block(u, 128, half_to_float(*scales), nullptr, values);
      return;
    }
    case WeightFormat::q4k:
    case WeightFormat::q5k:
    case WeightFormat::q6k:
      return decode_super(table.format, tile, lane, block, values);
  }
}

inline void embed(const EmbedOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t width = op.table.num_inputs;
  const Range mine = share(step.num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int64_t id = (op.of_positions ? step.positions[t] : step.token_ids[t]) + op.offset;
    const bool is_here = id >= 0 && id < op.table.num_outputs;
    const WeightTile tile = tile_of(op.table, is_here ? id / kTile : 0);
    float* out = row<float>(op.out, t);
    for (int64_t i = 0; i < width; i += kBlock) {
      const int64_t count = width - i < kBlock ? width - i : kBlock;
      float values[kBlock] = {};
      if (is_here) decode(tile.weight, tile.data, id % kTile, i, count, values);
      if (op.add) {
        add_values(values, count, out + i);
      } else {
        write_columns(op.out, t, i, count, values);
      }
    }
  }
}

QUIRE_OP(embed, EmbedOp, table, out, offset, of_positions, add)

}  // namespace
}  // namespace quire
