// What attention keeps of some rows while it goes through their tiles: all of it in the thread's scratch.
#pragma once
#include "ops/functions.h"
#include "ops/kv_cache.h"

namespace quire {
namespace {

constexpr int64_t kTileTokens = 128, kTileGroups = kTileTokens / kGroup;
constexpr int64_t kAttendRows = 24;  // rows of one KV head that go through its keys and values together
constexpr int64_t kMostRows = 192;   // the same with AMX (attend_amx.h)

// The softmax of some scores before its division. A weight is 2^(score' - highest), scores' being scores * log2(e).
struct Partial {
  float* highest;  // [rows], as whole vectors
  float* totals;   // [rows][16] sums of weights, still by lane
  float* sums;     // [rows][stride] values summed by weight
};
constexpr float kLowest = -1e30f;  // highest of no score at all

inline int64_t partial_bytes(int64_t num_rows, int64_t stride) {
  return ((num_rows + kLanes - 1) / kLanes * kLanes + num_rows * (kLanes + stride)) *
         static_cast<int64_t>(sizeof(float));
}
inline Partial partial_at(std::byte* memory, int64_t num_rows) {
  auto* highest = reinterpret_cast<float*>(memory);
  float* totals = highest + (num_rows + kLanes - 1) / kLanes * kLanes;
  return {highest, totals, totals + num_rows * kLanes};
}

// The rows of one work item. A row is one query: one head of one token.
struct AttendRows {
  int64_t count;
  int64_t stride;        // D as whole vectors
  int64_t query_stride;  // bytes
  std::byte* queries;    // in the format's own form
  std::byte* scores;     // [rows][kTileTokens] fp32 or int32, then in their place the weights
  std::byte* padded;     // values of a tile where D is no multiple of 16
  float* query_scales;   // i8
  int32_t* query_sums;   // i8: 128 times the sum of the query, since keys are stored as key + 128
  int32_t* lows;         // the first position that each row sees
  int32_t* highs;        // and the one after the last
  float scale;           // of scores, times log2(e)
  float cap_scale;       // of scores within tanh; 0: they are not capped
  Partial tile;
  Partial total;
};

// total += part, to a common highest score.
inline void merge(const Partial& part, int64_t num_rows, int64_t stride, const Partial& total) {
  float total_factors[kMostRows], part_factors[kMostRows];
  for (int64_t i = 0; i < num_rows; i += kLanes) {
    const F32x16 a = load(total.highest + i), b = load(part.highest + i), highest = max(a, b);
    F32x16 factors[2] = {a - highest, b - highest};
    exp2_of_non_positive(factors);
    store(total_factors + i, factors[0]);
    store(part_factors + i, factors[1]);
    store(total.highest + i, highest);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const F32x16 a = broadcast(total_factors[r]), b = broadcast(part_factors[r]);
    float* totals = total.totals + r * kLanes;
    store(totals, fma(b, load(part.totals + r * kLanes), a * load(totals)));
    const float* from = part.sums + r * stride;
    float* to = total.sums + r * stride;
    for (int64_t i = 0; i < stride; i += kLanes) store(to + i, fma(b, load(from + i), a * load(to + i)));
  }
}

// One row's result; `sink` is a weight without a value, relative to `highest`. Adding zero makes a sum of -0 what it is
// where masked values were skipped: +0.
inline void finish(const Partial& total, int64_t row, int64_t stride, float sink, float* out) {
  const F32x16 inverse = broadcast(1.0f / (sum(load(total.totals + row * kLanes)) + sink));
  for (int64_t i = 0; i < stride; i += kLanes) {
    store(out + i, load(total.sums + row * stride + i) * inverse + zero());
  }
}

}  // namespace
}  // namespace quire
