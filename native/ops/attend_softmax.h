// From scores of one tile to weights in the format's own form, row by row.
#pragma once
#include "ops/attend_formats.h"
#include "ops/attend_state.h"

namespace quire {
namespace {

// scores of positions outside low … high - 1 of the group that starts at `first`: -inf.
inline F32x16 masked(F32x16 scores, int64_t first, int64_t low, int64_t high) {
  static constexpr float kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32x16 lanes = load(kIota), nothing = broadcast(-__builtin_inff());
  scores = select_less(lanes, broadcast(static_cast<float>(low - first)), nothing, scores);
  return select_less(lanes, broadcast(static_cast<float>(high - first)), scores, nothing);
}

// int32 products to scores, and later weights times the values' scales to int16 with a common scale, which is returned.
inline void scale_scores(const AttendRows& rows, int64_t row, int64_t first, int64_t end, const float* const* scales) {
  const I32x16 offset = broadcast(-rows.query_sums[row]);
  const F32x16 scale = broadcast(rows.query_scales[row]);
  std::byte* scores = rows.scores + row * kTileTokens * 4;
  for (int64_t g = first; g < end; ++g) {
    std::byte* at = scores + g * kGroup * 4;
    const F32x16 products = to_float(load(reinterpret_cast<const int32_t*>(at)) + offset);
    store(reinterpret_cast<float*>(at), products * (scale * load(scales[g])));
  }
}
inline float quantise_weights(float* weights, int64_t first, int64_t end, const float* const* scales,
                              int64_t block_size) {
  F32x16 most = zero(), check = zero();
  for (int64_t g = first; g < end; ++g) {
    const F32x16 p = load(weights + g * kGroup);
    // Where the weight is zero the scale may be garbage.
    const F32x16 scaled = select_less(zero(), p, p * load(scales[g] + block_size), zero());
    most = max(scaled, most);
    check = fma(scaled, zero(), check);  // a NaN is lost by max
    store(weights + g * kGroup, scaled);
  }
  const float highest = largest(most);
  const F32x16 inverse = broadcast(highest > 0.0f ? 32767.0f / highest : 0.0f);
  for (int64_t g = first; g < end; ++g) {
    int32_t wide[kLanes];
    store(wide, round_to_int(load(weights + g * kGroup) * inverse));
    int16_t narrow[kLanes];
    for (int i = 0; i < kLanes; ++i) narrow[i] = static_cast<int16_t>(wide[i]);
    memcpy(reinterpret_cast<std::byte*>(weights) + g * kGroup * 2, narrow, sizeof narrow);
  }
  return highest / 32767.0f + sum(check);
}

// Scores of groups first … end - 1 to weights, which are zero where the row does not see. What weights must be
// multiplied with is returned.
template <class Kv>
float soften(const AttendRows& rows, int64_t row, int64_t begin, int64_t first, int64_t end, const float* const* scales,
             int64_t block_size) {
  std::byte* memory = rows.scores + row * kTileTokens * 4;
  auto* scores = reinterpret_cast<float*>(memory);
  int64_t low = rows.lows[row] - begin, high = rows.highs[row] - begin;
  low = low < first * kGroup ? first * kGroup : low;
  high = high > end * kGroup ? end * kGroup : high;
  const int64_t from = low < high ? low / kGroup : end, to = low < high ? (high + kGroup - 1) / kGroup : end;
  F32x16 totals = zero(), highest = broadcast(-__builtin_inff());
  if (Kv::kScaled) scale_scores(rows, row, from, to, scales);
  for (int64_t g = from; g < to; ++g) {
    const bool whole = g * kGroup >= low && (g + 1) * kGroup <= high;
    F32x16 values = load(scores + g * kGroup);
    if (!whole) {
      values = masked(values, g * kGroup, low, high);
      store(scores + g * kGroup, values);
    }
    highest = max(highest, values);
  }
  const float most = low < high ? largest(highest) * rows.scale : kLowest;
  const F32x16 scale = broadcast(rows.scale), offset = broadcast(-most);
  constexpr int64_t kBytes = Kv::kScaled ? 64 : kGroup / Kv::kTokens * Kv::kWeightBytes;
  for (int64_t g = first; g < from; ++g) memset(memory + g * kBytes, 0, kBytes);
  for (int64_t g = from; g < to; ++g) {
    const F32x16 p = exp2_of_non_positive(fma(load(scores + g * kGroup), scale, offset));
    totals = totals + p;
    if constexpr (Kv::kScaled) {
      store(scores + g * kGroup, p);
    } else {
      Kv::store_weights(memory + g * kBytes, p);
    }
  }
  for (int64_t g = to; g < end; ++g) memset(memory + g * kBytes, 0, kBytes);
  rows.tile.highest[row] = most;
  store(rows.tile.totals + row * kLanes, totals);
  return Kv::kScaled ? quantise_weights(scores, first, end, scales, block_size) : 1.0f;
}

}  // namespace
}  // namespace quire
