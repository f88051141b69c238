// Rows of a table that is packed like any weight: the head of a model with tied embeddings is stored once.
#pragma once
#include "isa/simd.h"
#include "plan/ops.h"

namespace quire {
namespace {

inline float half_to_float(uint16_t bits) {
  uint16_t padded[kLanes] = {bits};
  float values[kLanes];
  store(values, widen_f16(padded));
  return values[0];
}

// Input i of output `lane` of a packed tile, decoded to fp32.
inline float weight_at(WeightFormat format, const std::byte* tile, int64_t num_inputs, int64_t lane, int64_t i) {
  const int64_t block = i / kBlock, within = i % kBlock, blocks = num_inputs / kBlock;
  const auto* halves = reinterpret_cast<const uint16_t*>(tile);
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  switch (format) {
    case WeightFormat::f32: return reinterpret_cast<const float*>(tile)[i * kTile + lane];
    case WeightFormat::f16: return half_to_float(halves[i * kTile + lane]);
    case WeightFormat::bf16: {
      const uint32_t wide = static_cast<uint32_t>(halves[(i / 2 * kTile + lane) * 2 + i % 2]) << 16;
      float value;
      memcpy(&value, &wide, sizeof value);
      return value;
    }
    case WeightFormat::q4:
    case WeightFormat::q4m: {
      const uint8_t pair = bytes[block * 256 + within / 8 * 64 + lane * 4 + within % 4];
      const int u = within % 8 < 4 ? pair & 15 : pair >> 4;
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + blocks * 256) + block * kTile + lane;
      const float d = half_to_float(*scales);
      if (format == WeightFormat::q4) return d * static_cast<float>(u - 8);
      return d * static_cast<float>(u) + half_to_float(scales[blocks * kTile]);
    }
    case WeightFormat::q8: {
      const int u = bytes[block * 512 + within / 4 * 64 + lane * 4 + within % 4];
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + blocks * 512) + block * kTile + lane;
      return half_to_float(*scales) * static_cast<float>(u - 128);
    }
  }
  return 0.0f;
}

inline void embed(const EmbedOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t bytes = tile_bytes(op.table.format, op.table.num_inputs);
  const Range mine = share(step.num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int64_t id = (op.of_positions ? step.positions[t] : step.token_ids[t]) + op.offset;
    const std::byte* tile = op.table.data + id / kTile * bytes;
    float* out = row<float>(op.out, t);
    for (int64_t i = 0; i < op.table.num_inputs; ++i) {
      const float value = weight_at(op.table.format, tile, op.table.num_inputs, id % kTile, i);
      out[i] = op.add ? out[i] + value : value;
    }
  }
}

}  // namespace
}  // namespace quire
