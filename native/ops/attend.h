// Attention over paged keys and values (Vaswani 2017, eq. 1), with an online softmax.
#pragma once
#include "ops/functions.h"
#include "ops/kv_cache.h"
#include "ops/rows.h"
#include "plan/ops.h"

namespace quire {
namespace {

inline float kv_value(const KvLayer& kv, const std::byte* data, int64_t index) {
  if (kv.format == KvFormat::f32) return reinterpret_cast<const float*>(data)[index];
  if (kv.format == KvFormat::i8) return static_cast<float>(reinterpret_cast<const int8_t*>(data)[index]);
  uint16_t padded[kLanes] = {reinterpret_cast<const uint16_t*>(data)[index]};
  float values[kLanes];
  store(values, kv.format == KvFormat::bf16 ? widen_bf16(padded) : widen_f16(padded));
  return values[0];
}

inline void attend_head(const AttendOp& op, const int32_t* table, int64_t first, int64_t last, const float* q,
                        int64_t head, float* out) {
  const KvLayer& kv = op.kv;
  const int64_t width = kv.head_size, value_bytes = kv_value_bytes(kv.format);
  const bool scaled = kv.format == KvFormat::i8;
  float highest = -__builtin_inff(), total = 0.0f;
  for (int64_t i = 0; i < width; ++i) out[i] = 0.0f;
  for (int64_t position = first; position <= last; ++position) {
    const int64_t offset = position % kv.block_size;
    const std::byte* keys = kv_head(kv, table[position / kv.block_size], head);
    const std::byte* values = keys + kv.block_size * width * value_bytes;
    const auto* scales = reinterpret_cast<const float*>(values + kv.block_size * width * value_bytes);
    float score = 0.0f;
    for (int64_t i = 0; i < width; ++i) score += q[i] * kv_value(kv, keys, offset * width + i);
    score *= op.scale;
    if (scaled) score *= scales[offset];
    const float before = highest;
    highest = score > highest ? score : highest;
    float weights[kLanes] = {before - highest, score - highest};
    store(weights, exp(load(weights)));
    total = total * weights[0] + weights[1];
    const float weight = scaled ? weights[1] * scales[kv.block_size + offset] : weights[1];
    for (int64_t i = 0; i < width; ++i) {
      out[i] = out[i] * weights[0] + weight * kv_value(kv, values, offset * width + i);
    }
  }
  for (int64_t i = 0; i < width; ++i) out[i] /= total;
}

inline void attend(const AttendOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t width = op.kv.head_size, group = op.num_heads / op.kv.num_kv_heads;
  auto* values = reinterpret_cast<float*>(context.scratch);
  const Range mine = share(step.num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const int32_t* table = step.block_table(op.kv.group, step.token_requests[t]);
    const int64_t last = step.positions[t], start = last - op.window + 1;
    const int64_t first = op.window == 0 || start < 0 ? 0 : start;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      attend_head(op, table, first, last, op.q + t * op.stride + head * width, head / group, values + head * width);
    }
    write_columns(op.out, t, 0, op.num_heads * width, values);
    finish_row(op.out, t, op.num_heads * width);
  }
}

}  // namespace
}  // namespace quire
