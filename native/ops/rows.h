// Writing fp32 values as rows of any type: as they are, rounded to bf16, or quantised to int8 blocks.
#pragma once
#include "isa/simd.h"
#include "plan/types.h"

namespace quire {
namespace {

// 32 values to one block: scale = max|v| / 127, q = round(v / scale). NaN and infinity make the scale NaN, so that
// they reach the result; q is then 0.
inline void quantise_block(const float* values, ActBlock* out) {
  const F32x16 a = load(values), b = load(values + kLanes);
  const float highest = largest(max(abs(a), abs(b)));
  // max may lose a NaN; a + b keeps it, and times 0 is NaN for infinities as well.
  const bool finite = !any_above((a + b) * zero(), 0.0f);
  const float scale = finite ? highest / 127.0f : __builtin_nanf("");
  const F32x16 inverse = broadcast(finite && highest > 0.0f ? 127.0f / highest : 0.0f);
  const int32_t total = store_bytes(out->q, round_to_int(a * inverse), round_to_int(b * inverse));
  out->scale = scale;
  out->scaled_sum = scale * static_cast<float>(total);
  out->sum = total;
  out->unused = 0;
}

// Bytes of `count` columns of a row; q8 wants multiples of 32.
inline int64_t bytes_of_columns(RowType type, int64_t count) {
  if (type == RowType::q8) return count / kBlock * static_cast<int64_t>(sizeof(ActBlock));
  return count * (type == RowType::f32 ? 4 : 2);
}

// Columns first … first + count - 1 of row `index`; q8 wants multiples of 32.
inline void write_columns(const Rows& out, int64_t index, int64_t first, int64_t count, const float* values) {
  int64_t i = 0;
  if (out.type == RowType::f32) {
    float* target = row<float>(out, index) + first;
    for (; i + kLanes <= count; i += kLanes) store(target + i, load(values + i));
    for (; i < count; ++i) target[i] = values[i];
  } else if (out.type == RowType::bf16) {
    uint16_t* target = row<uint16_t>(out, index) + first;
    for (; i + kLanes <= count; i += kLanes) store_bf16(target + i, load(values + i));
    for (; i < count; ++i) target[i] = to_bf16(values[i]);
  } else {
    ActBlock* target = row<ActBlock>(out, index) + first / kBlock;
    for (; i < count; i += kBlock) quantise_block(values + i, target++);
  }
}

// After the last column: the zero that pairs with an odd bf16 row's last value.
inline void finish_row(const Rows& out, int64_t index, int64_t width) {
  if (out.type == RowType::bf16 && width % 2) row<uint16_t>(out, index)[width] = 0;
}

// All columns of `num_rows` rows of `out` in chunks: compute(row, first column, columns, values) leaves them in
// `values`. One decode's row is shared by all threads.
template <typename Compute>
void write_chunks(const Rows& out, int64_t num_rows, int64_t width, const Context& context, Compute compute) {
  constexpr int64_t kChunk = 256;
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  const Range mine = share(num_rows * chunks, context);
  float values[kChunk];
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / chunks, first = item % chunks * kChunk;
    const int64_t columns = width - first < kChunk ? width - first : kChunk;
    compute(t, first, columns, values);
    write_columns(out, t, first, columns, values);
    if (first + columns == width) finish_row(out, t, width);
  }
}

// to[i] += values[i]
inline void add_values(const float* values, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(to + i) + load(values + i));
  for (; i < count; ++i) to[i] += values[i];
}

}  // namespace
}  // namespace quire
