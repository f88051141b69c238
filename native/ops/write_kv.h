// Queries and keys normalised and rotated (RoPE: Su 2021, sec. 3.4.2), keys and values written to their slots of the
// pool (layout: kv_cache.h).
#pragma once
#include "ops/kv_cache.h"
#include "ops/kv_values.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "plan/op.h"

namespace quire {

// Queries and keys of each token normalised per head (if norms are given) and rotated in place (if cos is given), by
// pairs (i, i + half); then keys and values written to the token's slot of the pool.
struct WriteKvOp {
  float* q;  // [T, H, D], f32, rows q_stride elements apart; null: nothing to do for queries
  float* k;  // [T, K, D]
  float* v;  // [T, K, D]
  int64_t q_stride, k_stride, v_stride;
  int32_t num_heads;
  const float* q_norm;  // [D] or null
  const float* k_norm;
  float epsilon;
  const float* cos;  // [T, half] or null
  const float* sin;
  int64_t half;
  KvLayer kv;
  const float* q_cos;  // [T, half]: of queries, where they turn by other values than keys; else null
  const float* q_sin;
};

namespace {

// Where a token's key and value of one head go.
struct Slot {
  KvHead head;
  int64_t offset;  // in the block
};
inline Slot slot_of(const KvLayer& kv, const Step& step, int64_t token, int64_t head) {
  const int64_t position = step.positions[token];
  const int32_t* table = step.block_table(kv.group, step.token_requests[token]);
  return {kv_head(kv, table[position / kv.block_size], head), position % kv.block_size};
}

// Memory of one thread: a head's values in whole vectors, and as two rows of the pool's format.
struct HeadRows {
  int64_t width;  // D as whole vectors
  float* wide;
  std::byte* narrow[2];
};

inline float narrow_row(const KvLayer& kv, const float* x, const HeadRows& rows, int index) {
  memcpy(rows.wide, x, static_cast<size_t>(kv.head_size) * sizeof(float));
  return narrow_head(kv.format, rows.wide, rows.width, rows.narrow[index]);
}

template <int kBytes>
void scatter(const std::byte* from, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * kGroup * kBytes, from + i * kBytes, kBytes);
}

inline void write_key(const KvLayer& kv, const Slot& slot, const float* x, const HeadRows& rows) {
  const float scale = narrow_row(kv, x, rows, 0);
  std::byte* key = rows.narrow[0];
  std::byte* to = slot.head.keys + slot.offset / kGroup * key_group_bytes(kv.format, kv.head_size);
  const int64_t lane = slot.offset % kGroup, width = kv.head_size;
  switch (kv.format) {
    case KvFormat::f32:
      scatter<4>(key, width, to + lane * 4);
      break;
    case KvFormat::f16:
      scatter<2>(key, width, to + lane * 2);
      break;
    case KvFormat::bf16:
      scatter<4>(key, width / 2, to + lane * 4);
      break;
    case KvFormat::i8:
      for (int64_t i = 0; i < rows.width; ++i) key[i] ^= std::byte{128};
      scatter<4>(key, (width + 3) / 4, to + lane * 4);
      slot.head.scales[slot.offset] = scale;
      break;
    case KvFormat::e4m3:
    case KvFormat::e5m2:
      scatter<1>(key, width, to + lane);
      break;
  }
}

// Values a and b of a pair of tokens, or one of them beside what is there.
template <typename Narrow, typename Wide>
void write_pair(const std::byte* a, const std::byte* b, int64_t width, std::byte* to) {
  for (int64_t i = 0; i < width; ++i) {
    Narrow first, second;
    memcpy(&first, a + i * static_cast<int64_t>(sizeof first), sizeof first);
    memcpy(&second, b + i * static_cast<int64_t>(sizeof second), sizeof second);
    const Wide pair = static_cast<Wide>(first | second << (8 * sizeof(Narrow)));
    memcpy(to + i * static_cast<int64_t>(sizeof pair), &pair, sizeof pair);
  }
}
template <int kBytes>
void write_half(const std::byte* from, int64_t width, std::byte* to) {
  for (int64_t i = 0; i < width; ++i) memcpy(to + 2 * i * kBytes, from + i * kBytes, kBytes);
}

// Row 0 is the token's; with `paired`, row 1 is that of the token before it, which is written too.
inline void write_value(const KvLayer& kv, const Slot& slot, const HeadRows& rows, bool paired) {
  const int64_t width = kv.head_size, row_bytes = width * kv_value_bytes(kv.format);
  if (kv.format == KvFormat::f32 || kv.format == KvFormat::f16 || is_f8(kv.format)) {
    memcpy(slot.head.values + slot.offset * row_bytes, rows.narrow[0], static_cast<size_t>(row_bytes));
    return;
  }
  std::byte* to = slot.head.values + slot.offset / 2 * 2 * row_bytes;
  const bool is_i8 = kv.format == KvFormat::i8;
  if (paired) {
    if (is_i8) {
      write_pair<uint8_t, uint16_t>(rows.narrow[1], rows.narrow[0], width, to);
    } else {
      write_pair<uint16_t, uint32_t>(rows.narrow[1], rows.narrow[0], width, to);
    }
  } else if (is_i8) {
    write_half<1>(rows.narrow[0], width, to + slot.offset % 2);
  } else {
    write_half<2>(rows.narrow[0], width, to + slot.offset % 2 * 2);
  }
}

// One thread's items are those from `begin` to `end` of all tokens' queries, keys and values. A pair of values whose
// tokens are both the thread's is written at once, at its second token.
inline void write_value_item(const WriteKvOp& op, const Step& step, int64_t token, int64_t head, bool has_before,
                             bool has_after, const HeadRows& rows) {
  const KvLayer& kv = op.kv;
  const int64_t position = step.positions[token], start = step.starts[step.token_requests[token]];
  const int64_t last = start + step.counts[step.token_requests[token]] - 1;
  const bool pairs = kv.format == KvFormat::bf16 || kv.format == KvFormat::i8;
  if (pairs && position % 2 == 0 && has_after && position < last) return;
  const bool paired = pairs && position % 2 == 1 && has_before && position > start;
  const Slot slot = slot_of(kv, step, token, head);
  const float* v = op.v + token * op.v_stride + head * kv.head_size;
  const float scale = narrow_row(kv, v, rows, 0);
  const float scale_before = paired ? narrow_row(kv, v - op.v_stride, rows, 1) : 0.0f;
  write_value(kv, slot, rows, paired);
  if (kv.format != KvFormat::i8) return;
  slot.head.scales[kv.block_size + slot.offset] = scale;
  if (paired) slot.head.scales[kv.block_size + slot.offset - 1] = scale_before;
}

inline void write_kv(const WriteKvOp& op, const Context& context) {
  const Step& step = *context.step;
  const KvLayer& kv = op.kv;
  const int64_t width = kv.head_size;
  const int64_t group = op.q == nullptr ? 0 : op.num_heads / kv.num_kv_heads;
  const int64_t items = (group + 2) * kv.num_kv_heads;  // of a token: each KV head's queries, key and value
  HeadRows rows;
  rows.width = (width + kLanes - 1) / kLanes * kLanes;
  rows.wide = reinterpret_cast<float*>(context.scratch);
  rows.narrow[0] = context.scratch + rows.width * 4;
  rows.narrow[1] = rows.narrow[0] + rows.width * 4;
  memset(rows.wide, 0, static_cast<size_t>(rows.width) * sizeof(float));
  const Range mine = share(step.num_tokens * items, context);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t token = item / items, head = item % items / (group + 2), kind = item % (group + 2);
    if (kind == group + 1) {
      write_value_item(op, step, token, head, item - items >= mine.begin, item + items < mine.end, rows);
      continue;
    }
    const bool is_query = kind < group;
    float* x = is_query ? op.q + token * op.q_stride + (head * group + kind) * width
                        : op.k + token * op.k_stride + head * width;
    const float* weight = is_query ? op.q_norm : op.k_norm;
    if (weight != nullptr) normalise(x, weight, nullptr, x, width, op.epsilon, false);
    const float* cos = is_query && op.q_cos != nullptr ? op.q_cos : op.cos;
    const float* sin = is_query && op.q_cos != nullptr ? op.q_sin : op.sin;
    if (cos != nullptr) rotate(x, cos + token * op.half, sin + token * op.half, op.half);
    if (!is_query) write_key(kv, slot_of(kv, step, token, head), x, rows);
  }
}

QUIRE_OP(write_kv, WriteKvOp, q, k, v, q_stride, k_stride, v_stride, num_heads, q_norm, k_norm, epsilon, cos, sin, half,
         kv, q_cos, q_sin)

}  // namespace
}  // namespace quire
