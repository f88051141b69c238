// The cache of latent attention: per token one entry, its latent of R values, then its rotary key of C values.
//
// A layer's block is B entries one after another; int8 has then B fp32 scales, one for each entry.
#pragma once
#include "ops/kv_cache.h"
#include "ops/kv_values.h"
#include "ops/rope.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// Rotates the first C of each query head's D values and each token's rotary key in place (if cos is given), by pairs
// (i, i + half); then writes the token's entry.
struct WriteLatentOp {
  float* q;       // [T, H, D], f32, rows q_stride elements apart
  float* rotary;  // [T, C]
  float* latent;  // [T, R]
  int64_t q_stride, rotary_stride, latent_stride;
  int64_t num_heads;
  int64_t head_size;  // D
  const float* cos;   // [T, half] or null
  const float* sin;
  int64_t half;
  int64_t rank;  // R
  KvLayer kv;    // head_size R + C
};

namespace {

inline int64_t whole_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

struct LatentEntry {
  std::byte* values;
  float* scale;  // i8
};
inline LatentEntry latent_entry(const KvLayer& kv, const int32_t* table, int64_t position) {
  std::byte* block = kv.base + table[position / kv.block_size] * kv.block_stride_bytes;
  const int64_t bytes = kv.head_size * kv_value_bytes(kv.format), offset = position % kv.block_size;
  return {block + offset * bytes, reinterpret_cast<float*>(block + kv.block_size * bytes) + offset};
}

inline F32x16 widen_values(KvFormat format, const std::byte* from, float scale) {
  if (format == KvFormat::f32) return load(reinterpret_cast<const float*>(from));
  if (format == KvFormat::f16) return widen_f16(reinterpret_cast<const uint16_t*>(from));
  if (format == KvFormat::bf16) return widen_bf16(reinterpret_cast<const uint16_t*>(from));
  if (format == KvFormat::e4m3) return widen_e4m3(reinterpret_cast<const uint8_t*>(from));
  if (format == KvFormat::e5m2) return widen_e5m2(reinterpret_cast<const uint8_t*>(from));
  int32_t wide[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) wide[lane] = reinterpret_cast<const int8_t*>(from)[lane];
  return to_float(load(wide)) * broadcast(scale);
}

// An entry as fp32; past its end zeros up to whole vectors.
inline void widen_entry(const KvLayer& kv, const LatentEntry& entry, float* out) {
  const KvFormat format = kv.format;  // a copy: `out` may not change it
  const int64_t width = kv.head_size, bytes = kv_value_bytes(format), whole = width - width % kLanes;
  const float scale = format == KvFormat::i8 ? *entry.scale : 1.0f;
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, widen_values(format, entry.values + i * bytes, scale));
  if (whole == width) return;
  alignas(64) std::byte rest[kLanes * 4] = {};
  memcpy(rest, entry.values + whole * bytes, static_cast<size_t>((width - whole) * bytes));
  store(out + whole, widen_values(format, rest, scale));
}

inline void write_latent(const WriteLatentOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t width = op.kv.head_size, rotary = width - op.rank, items = op.num_heads + 1;
  const Range mine = share(step.num_tokens * items, context);
  float* wide = reinterpret_cast<float*>(context.scratch);
  std::byte* narrow = context.scratch + whole_lanes(width) * 4;
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / items, head = item % items;
    const float *cos = op.cos + t * op.half, *sin = op.sin + t * op.half;
    if (head < op.num_heads) {
      if (op.cos != nullptr) rotate(op.q + t * op.q_stride + head * op.head_size, cos, sin, op.half);
      continue;
    }
    if (op.cos != nullptr) rotate(op.rotary + t * op.rotary_stride, cos, sin, op.half);
    for (int64_t i = width; i < whole_lanes(width); ++i) wide[i] = 0.0f;
    memcpy(wide, op.latent + t * op.latent_stride, static_cast<size_t>(op.rank) * sizeof(float));
    memcpy(wide + op.rank, op.rotary + t * op.rotary_stride, static_cast<size_t>(rotary) * sizeof(float));
    const float scale = narrow_head(op.kv.format, wide, whole_lanes(width), narrow);
    const int32_t* table = step.block_table(op.kv.group, step.token_requests[t]);
    const LatentEntry entry = latent_entry(op.kv, table, step.positions[t]);
    memcpy(entry.values, narrow, static_cast<size_t>(width * kv_value_bytes(op.kv.format)));
    if (op.kv.format == KvFormat::i8) *entry.scale = scale;
  }
}

QUIRE_OP(write_latent, WriteLatentOp, q, rotary, latent, q_stride, rotary_stride, latent_stride, num_heads, head_size,
         cos, sin, half, rank, kv)

}  // namespace
}  // namespace quire
