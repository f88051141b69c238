// The rows of an item: where they lie in scratch, their queries in the format's own form, and how results leave it.
#pragma once
#include "ops/attend_formats.h"
#include "ops/attend_state.h"
#include "ops/attend_work.h"
#include "ops/kv_values.h"
#include "ops/rows.h"

namespace quire {
namespace {

inline int64_t padded_head_size(int64_t head_size) { return (head_size + kLanes - 1) / kLanes * kLanes; }

// Takes `bytes` of a scratch, in whole cache lines.
template <typename T>
T* take(std::byte** memory, int64_t bytes) {
  T* taken = reinterpret_cast<T*>(*memory);
  *memory += (bytes + 63) / 64 * 64;
  return taken;
}

inline void set_scales(const AttendOp& op, AttendRows* rows) {
  rows->cap_scale = op.soft_cap == 0.0f ? 0.0f : op.scale / op.soft_cap;
  rows->scale = (op.soft_cap == 0.0f ? op.scale : op.soft_cap) * 1.44269504f;
}

inline AttendRows lay_out(const AttendOp& op, std::byte* memory) {
  AttendRows rows{};
  rows.stride = padded_head_size(op.kv.head_size);
  rows.query_stride = rows.stride * 4;
  rows.queries = take<std::byte>(&memory, kAttendRows * rows.query_stride);
  rows.scores = take<std::byte>(&memory, kAttendRows * kTileTokens * 4);
  rows.query_scales = take<float>(&memory, kAttendRows * 4);
  rows.query_sums = take<int32_t>(&memory, kAttendRows * 4);
  rows.lows = take<int32_t>(&memory, kAttendRows * 4);
  rows.highs = take<int32_t>(&memory, kAttendRows * 4);
  set_scales(op, &rows);
  rows.tile = partial_at(take<std::byte>(&memory, partial_bytes(kAttendRows, rows.stride)), kAttendRows);
  rows.total = partial_at(take<std::byte>(&memory, partial_bytes(kAttendRows, rows.stride)), kAttendRows);
  rows.padded = memory;
  return rows;
}

// One query as int8; keys being stored as key + 128, 128 times its sum is too much in every score.
inline void quantise_query(const float* q, int64_t width, const AttendRows& rows, int64_t row) {
  int8_t out[kMaxHeadSize];
  rows.query_scales[row] = quantise_head(q, width, out);
  std::byte* to = rows.queries + row * rows.query_stride;
  for (int64_t i = 0; i < width; i += 4, to += kQuadBytes) store_quad(to, out + i);
  int32_t total = 0;
  for (int64_t i = 0; i < width; ++i) total += out[i];
  rows.query_sums[row] = 128 * total;
}

// An item's rows one after the other: each one's token of the step and query head.
struct RowPlace {
  int64_t token, head, first_head, end_head;

  void advance() {
    if (++head < end_head) return;
    head = first_head;
    ++token;
  }
};
inline RowPlace first_place(const AttendOp& op, const Step& step, const Item& item) {
  const int64_t group = op.num_heads / op.kv.num_kv_heads, first_head = item.head * group;
  const int64_t token = step.first_tokens[item.request] + item.first_row / group;
  return {token, first_head + item.first_row % group, first_head, first_head + group};
}
inline float* query_at(const AttendOp& op, const RowPlace& place) {
  return op.q + place.token * op.stride + place.head * op.kv.head_size;
}

template <class Kv>
void load_rows(const AttendOp& op, const Step& step, const Item& item, AttendRows* rows) {
  const int64_t width = op.kv.head_size;
  rows->count = item.num_rows;
  RowPlace place = first_place(op, step, item);
  for (int64_t row = 0; row < item.num_rows; ++row, place.advance()) {
    for (int64_t i = 0; i < width; i += kLanes) __builtin_prefetch(query_at(op, place) + i);
  }
  place = first_place(op, step, item);
  for (int64_t row = 0; row < item.num_rows; ++row, place.advance()) {
    const int64_t position = step.positions[place.token], start = position - op.window + 1;
    rows->lows[row] = static_cast<int32_t>(op.window == 0 || start < 0 ? 0 : start);
    rows->highs[row] = static_cast<int32_t>(position + 1);
    const float* q = query_at(op, place);
    if (width != rows->stride) {
      // Whole vectors are read, of the last query past its memory. What is past D must be zero for int8: it counts for
      // the query's scale and sum, and steps of four dimensions may pass D.
      memcpy(rows->tile.sums, q, static_cast<size_t>(width) * sizeof(float));
      memset(rows->tile.sums + width, 0, static_cast<size_t>(rows->stride - width) * sizeof(float));
      q = rows->tile.sums;
    }
    if constexpr (Kv::kScaled) {
      quantise_query(q, rows->stride, *rows, row);
    } else {
      std::byte* to = rows->queries + row * rows->query_stride;
      constexpr int64_t kBytes = kLanes / Kv::kDims * Kv::kQueryBytes;
      for (int64_t i = 0; i < rows->stride; i += kLanes) Kv::store_query(to + i / kLanes * kBytes, load(q + i));
    }
  }
}

// Whether an int8 block of the output spans heads, which different threads compute: then results wait in the queries'
// memory until all are there.
inline bool writes_late(const AttendOp& op) { return op.out.type == RowType::q8 && op.kv.head_size % kBlock != 0; }

// The weight of a row's sink, which is a score that no position has: e^sink, relative to 2^highest.
inline float sink_weight(const AttendOp& op, const AttendRows& rows, int64_t row, int64_t head) {
  if (op.sinks == nullptr) return 0.0f;
  float weights[kLanes];
  store(weights, exp(broadcast(op.sinks[head] - rows.total.highest[row] * 0.69314718f)));
  return weights[0];
}

inline void write_rows(const AttendOp& op, const Step& step, const Item& item, const AttendRows& rows) {
  const int64_t width = op.kv.head_size;
  constexpr int64_t kAhead = 8;
  RowPlace place = first_place(op, step, item), ahead = place;
  for (int64_t r = -kAhead; r < rows.count; ++r) {
    if (r + kAhead < rows.count) {
      const std::byte* to = row<std::byte>(op.out, ahead.token) + bytes_of_columns(op.out.type, ahead.head * width);
      for (int64_t i = 0; i < bytes_of_columns(op.out.type, width); i += 64) prefetch_to_write(to + i);
      ahead.advance();
    }
    if (r < 0) continue;
    float* values = rows.tile.sums;
    finish(rows.total, r, rows.stride, sink_weight(op, rows, r, place.head), values);
    if (writes_late(op)) {
      memcpy(query_at(op, place), values, static_cast<size_t>(width) * sizeof(float));
    } else {
      write_columns(op.out, place.token, place.head * width, width, values);
    }
    place.advance();
  }
}

}  // namespace
}  // namespace quire
