// Where keys and values lie in a block of the pool. A layer's block is one part per KV head, each:
//   keys    per 16 tokens: f32, f16, FP8 [D][16]; bf16 [D / 2][16][2]; i8 [ceil(D / 4)][16][4], stored as u8 = key +
//   128 values  f32, f16, FP8 [B][D]; bf16 and i8 [B / 2][D][2]: pairs of tokens i8 only: fp32 scales of keys [B], then
//   of values [B]
// Keys are what a query wants: one vector holds a step of the dot products of 16 tokens. Values are what a weighted sum
// wants: one vector holds 16 dimensions of a token or of a pair.
#pragma once
#include "plan/types.h"

namespace quire {
namespace {

constexpr int64_t kGroup = 16;         // tokens whose keys lie together
constexpr int64_t kMaxHeadSize = 576;  // rows of one work item of this size fit a thread's scratch (attend.h)

inline bool is_f8(KvFormat format) { return format == KvFormat::e4m3 || format == KvFormat::e5m2; }
inline int64_t kv_value_bytes(KvFormat format) {
  return format == KvFormat::f32 ? 4 : format == KvFormat::i8 || is_f8(format) ? 1 : 2;
}

inline int64_t key_group_bytes(KvFormat format, int64_t head_size) {
  return kGroup * (format == KvFormat::i8 ? (head_size + 3) / 4 * 4 : head_size * kv_value_bytes(format));
}
inline int64_t value_group_bytes(KvFormat format, int64_t head_size) {
  return kGroup * head_size * kv_value_bytes(format);
}

// Bytes of one layer's block.
inline int64_t kv_layer_bytes(KvFormat format, int64_t block_size, int64_t num_kv_heads, int64_t head_size) {
  const int64_t groups = key_group_bytes(format, head_size) + value_group_bytes(format, head_size);
  const int64_t scales = format == KvFormat::i8 ? 2 * block_size * 4 : 0;
  return num_kv_heads * (block_size / kGroup * groups + scales);
}

// One head's part of one block.
struct KvHead {
  std::byte* keys;
  std::byte* values;
  float* scales;  // i8: of keys [B], of values [B]
};
inline KvHead kv_head(const KvLayer& kv, int64_t block, int64_t head) {
  const int64_t bytes = kv_layer_bytes(kv.format, kv.block_size, 1, kv.head_size);
  const int64_t groups = kv.block_size / kGroup;
  std::byte* keys = kv.base + block * kv.block_stride_bytes + head * bytes;
  std::byte* values = keys + groups * key_group_bytes(kv.format, kv.head_size);
  std::byte* scales = values + groups * value_group_bytes(kv.format, kv.head_size);
  return {keys, values, reinterpret_cast<float*>(scales)};
}

}  // namespace
}  // namespace quire
