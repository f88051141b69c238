// Queries and keys normalised and rotated, keys and values written to their slots of the pool.
#pragma once
#include "isa/simd.h"
#include "ops/kv_cache.h"
#include "ops/norm.h"
#include "plan/ops.h"

namespace quire {
namespace {

inline uint16_t to_f16(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

inline void store_kv(const KvLayer& kv, std::byte* data, float* scale, const float* x) {
  const int64_t width = kv.head_size;
  if (kv.format == KvFormat::f32) {
    memcpy(data, x, static_cast<size_t>(width) * sizeof(float));
  } else if (kv.format == KvFormat::i8) {
    float highest = 0.0f;
    for (int64_t i = 0; i < width; ++i) highest = __builtin_fabsf(x[i]) > highest ? __builtin_fabsf(x[i]) : highest;
    *scale = highest / 127.0f;
    const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    for (int64_t i = 0; i < width; ++i) {
      reinterpret_cast<int8_t*>(data)[i] = static_cast<int8_t>(__builtin_nearbyintf(x[i] * inverse));
    }
  } else {
    auto* out = reinterpret_cast<uint16_t*>(data);
    for (int64_t i = 0; i < width; ++i) out[i] = kv.format == KvFormat::bf16 ? to_bf16(x[i]) : to_f16(x[i]);
  }
}

inline void write_kv(const WriteKvOp& op, const Context& context) {
  const Step& step = *context.step;
  const KvLayer& kv = op.kv;
  const int64_t heads = op.q == nullptr ? 0 : op.num_heads, items = heads + kv.num_kv_heads, width = kv.head_size;
  const int64_t value_bytes = kv_value_bytes(kv.format);
  const Range mine = share(step.num_tokens * items, context);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / items, head = item % items, kv_index = head - heads;
    float* x = head < heads ? op.q + t * op.stride + head * width : op.k + t * op.stride + kv_index * width;
    const float* weight = head < heads ? op.q_norm : op.k_norm;
    if (weight != nullptr) normalise(x, weight, nullptr, x, width, op.epsilon, false);
    if (op.cos != nullptr) rotate(x, op.cos + t * width / 2, op.sin + t * width / 2, width / 2);
    if (head < heads) continue;
    const int64_t position = step.positions[t], offset = position % kv.block_size;
    const int32_t* table = step.block_table(kv.group, step.token_requests[t]);
    std::byte* block = kv_head(kv, table[position / kv.block_size], kv_index);
    auto* scales = reinterpret_cast<float*>(block + 2 * kv.block_size * width * value_bytes);
    store_kv(kv, block + offset * width * value_bytes, scales + offset, x);
    store_kv(kv, block + (kv.block_size + offset) * width * value_bytes, scales + kv.block_size + offset,
             op.v + t * op.stride + kv_index * width);
  }
}

}  // namespace
}  // namespace quire
