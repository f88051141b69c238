// Writing fp32 values as rows of any type: as they are, rounded to bf16, or quantised to int8 blocks.
#pragma once
#include "isa/simd.h"
#include "plan/types.h"

namespace quire {
namespace {

// N blocks of 32 values each to blocks `stride_bytes` apart: scale = max|v| / 127, q = round(v / scale). NaN and
// infinity make the scale NaN, so that they reach the result; q is then 0.
template <int N>
[[gnu::always_inline]] inline void quantise_blocks(const float* values, std::byte* out, int64_t stride_bytes) {
  float highest[N];
  bool finite[N];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) {
    const F32x16 a = load(values + i * kBlock), b = load(values + i * kBlock + kLanes);
    highest[i] = largest(max(abs(a), abs(b)));
    // max may lose a NaN; a + b keeps it, and times 0 is NaN for infinities as well.
    finite[i] = !any_above((a + b) * zero(), 0.0f);
  }
  float scales[N], inverses[N];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) {
    scales[i] = finite[i] ? highest[i] / 127.0f : __builtin_nanf("");
    inverses[i] = finite[i] && highest[i] > 0.0f ? 127.0f / highest[i] : 0.0f;
  }
  QUIRE_UNROLL for (int i = 0; i < N; ++i) {
    auto* block = reinterpret_cast<ActBlock*>(out + i * stride_bytes);
    const F32x16 inverse = broadcast(inverses[i]);
    const I32x16 a = round_to_int(load(values + i * kBlock) * inverse);
    const I32x16 b = round_to_int(load(values + i * kBlock + kLanes) * inverse);
    const ByteSums sums = store_bytes(block->q, a, b);
    block->scale = scales[i];
    block->scaled_sum = scales[i] * static_cast<float>(sums.all);
    block->sum = sums.all;
    block->first_sum = sums.first;
  }
}

// Four blocks side by side: each alone is a chain that waits for itself. With activations side by side (functions.h)
// the end of a gated product takes half the time, and the whole product 5 to 10 % less (Zen 5, 8 to 64 rows).
inline void quantise(const float* values, int64_t num_blocks, std::byte* out, int64_t stride_bytes) {
  int64_t i = 0;
  for (; i + 4 <= num_blocks; i += 4) quantise_blocks<4>(values + i * kBlock, out + i * stride_bytes, stride_bytes);
  for (; i < num_blocks; ++i) quantise_blocks<1>(values + i * kBlock, out + i * stride_bytes, stride_bytes);
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
    constexpr auto kBytes = static_cast<int64_t>(sizeof(ActBlock));
    quantise(values, count / kBlock, row<std::byte>(out, index) + first / kBlock * kBytes, kBytes);
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
