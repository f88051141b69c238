// Where keys and values of a block lie, and how they are stored: fp32, fp16, bf16, or int8 with a scale per token and
// head.
#pragma once
#include "plan/types.h"

namespace quire {
namespace {

inline int64_t kv_value_bytes(KvFormat format) { return format == KvFormat::f32 ? 4 : format == KvFormat::i8 ? 1 : 2; }

// Bytes of one head's block: keys [B][D], values [B][D], and for int8 fp32 scales of keys [B] and of values [B].
inline int64_t kv_head_bytes(KvFormat format, int64_t block_size, int64_t head_size) {
  return 2 * block_size * head_size * kv_value_bytes(format) + (format == KvFormat::i8 ? 2 * block_size * 4 : 0);
}

// Bytes of one layer's block.
inline int64_t kv_layer_bytes(KvFormat format, int64_t block_size, int64_t num_kv_heads, int64_t head_size) {
  return num_kv_heads * kv_head_bytes(format, block_size, head_size);
}

inline std::byte* kv_head(const KvLayer& kv, int64_t block, int64_t head) {
  return kv.base + block * kv.block_stride_bytes + head * kv_head_bytes(kv.format, kv.block_size, kv.head_size);
}

}  // namespace
}  // namespace quire
