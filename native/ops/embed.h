// Rows of a table that is packed like any weight: the head of a model with tied embeddings is stored once.
#pragma once
#include "isa/simd.h"
#include "ops/gemm_q.h"
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

// The values of block `block` of one output: two roundings, as GGUF's formats are defined.
template <WeightFormat kFormat>
void decode_block(const std::byte* data, int64_t blocks, int64_t lane, int64_t block, float* values) {
  constexpr int kInputs = line_inputs(kFormat);
  const QTile<kFormat> tile(data, blocks);
  const auto of_lane = [lane](F32x16 all) {
    float lanes[kLanes];
    store(lanes, all);
    return broadcast(lanes[lane]);
  };
  int32_t integers[kBlock];
  uint32_t low, upper = 0;
  for (int i = 0; i < kBlock; ++i) {
    if (i % kInputs == 0) copy_lines(tile, block, i / kInputs, lane, 1, &low, &upper);
    integers[i] = integer_of<kFormat>(low, upper, i);
  }
  for (int i = 0; i < kBlock; i += kLanes) {
    const F32x16 d = of_lane(tile.scale(block, i * QTile<kFormat>::kParts / kBlock));
    F32x16 value = d * to_float(load(integers + i));
    if constexpr (QTile<kFormat>::kHasMinima) value = value + of_lane(tile.minimum(block));
    store(values + i, value);
  }
}

// Inputs first … first + count - 1 of output `lane` of a packed tile, as fp32. At most 32, from a multiple of 32 on;
// values past the last are anything.
inline void decode(const Weight& table, const std::byte* tile, int64_t lane, int64_t first, int64_t count,
                   float* values) {
  const auto* halves = reinterpret_cast<const uint16_t*>(tile);
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
    default:
      return choose_by_format(table.format, []<WeightFormat kFormat>() { return &decode_block<kFormat>; })(
          tile, table.num_inputs / kBlock, lane, first / kBlock, values);
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
