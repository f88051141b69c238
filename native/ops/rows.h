// Writing fp32 values as rows of any type: as they are, rounded to bf16, or quantised to int8 blocks.
#pragma once
#include "isa/simd.h"
#include "plan/types.h"

namespace quire {
namespace {

// 32 values to one block: scale = max|v| / 127, q = round(v / scale). NaN and infinity become a NaN scale, so that
// they reach the result.
inline void quantise_block(const float* values, ActBlock* out) {
  const F32x16 a = load(values), b = load(values + kLanes);
  const float highest = largest(max(abs(a), abs(b)));
  // A NaN is lost by max; a sum keeps it, and infinities give NaN or infinity.
  const float check = sum((a + b) * broadcast(0.0f));
  const float scale = highest / 127.0f + check;
  const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
  int32_t q[kBlock];
  store(q, round_to_int(a * broadcast(inverse)));
  store(q + kLanes, round_to_int(b * broadcast(inverse)));
  int32_t total = 0;
  for (int i = 0; i < kBlock; ++i) {
    out->q[i] = static_cast<int8_t>(q[i]);
    total += static_cast<int8_t>(q[i]);
  }
  out->scale = scale;
  out->sum = total;
  out->scaled_sum = scale * static_cast<float>(total);
  out->unused = 0;
}

// Columns first … first + count - 1 of row `index`; q8 wants multiples of 32.
inline void write_columns(const Rows& out, int64_t index, int64_t first, int64_t count, const float* values) {
  if (out.type == RowType::f32) {
    memcpy(row<float>(out, index) + first, values, static_cast<size_t>(count) * sizeof(float));
  } else if (out.type == RowType::bf16) {
    uint16_t* target = row<uint16_t>(out, index) + first;
    for (int64_t i = 0; i < count; ++i) target[i] = to_bf16(values[i]);
  } else {
    ActBlock* target = row<ActBlock>(out, index) + first / kBlock;
    for (int64_t i = 0; i < count; i += kBlock) quantise_block(values + i, target++);
  }
}

// After the last column: the zero that pairs with an odd bf16 row's last value.
inline void finish_row(const Rows& out, int64_t index, int64_t width) {
  if (out.type == RowType::bf16 && width % 2) row<uint16_t>(out, index)[width] = 0;
}

}  // namespace
}  // namespace quire
