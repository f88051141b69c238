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

// The groups of a tile that some row sees, and the positions of it that one row sees.
struct Seen {
  int64_t first, end;  // groups
  int64_t low, high;   // tokens of the tile, within the groups
  int64_t from, to;    // groups with such tokens
};
inline Seen seen_by(const AttendRows& rows, int64_t row, int64_t begin, int64_t first, int64_t end) {
  Seen seen{first, end, rows.lows[row] - begin, rows.highs[row] - begin, end, end};
  if (seen.low < first * kGroup) seen.low = first * kGroup;
  if (seen.high > end * kGroup) seen.high = end * kGroup;
  if (seen.low < seen.high) {
    seen.from = seen.low / kGroup;
    seen.to = (seen.high + kGroup - 1) / kGroup;
  }
  return seen;
}

// Rows of an item are in the order of their tokens: the first sees the least of the end, the last of the beginning.
inline bool sees_whole_tile(const AttendRows& rows, int64_t begin) {
  return rows.lows[rows.count - 1] <= begin && rows.highs[0] >= begin + kTileTokens;
}

// int8: the integer products of groups from … to - 1 become scores.
[[gnu::always_inline]] inline void scale_scores(const AttendRows& rows, int64_t row, const Seen& seen,
                                                const float* const* scales) {
  const I32x16 offset = broadcast(-rows.query_sums[row]);
  const F32x16 scale = broadcast(rows.query_scales[row]);
  std::byte* scores = rows.scores + row * kTileTokens * 4;
  for (int64_t g = seen.from; g < seen.to; ++g) {
    std::byte* at = scores + g * kGroup * 4;
    const F32x16 products = to_float(load(reinterpret_cast<const int32_t*>(at)) + offset);
    store(reinterpret_cast<float*>(at), products * (scale * load(scales[g])));
  }
}

// Scores become tanh(cap_scale * score); rows.scale has the factor before it.
inline void cap_scores(const AttendRows& rows, int64_t row, const Seen& seen) {
  auto* scores = reinterpret_cast<float*>(rows.scores + row * kTileTokens * 4);
  for (int64_t i = seen.from * kGroup; i < seen.to * kGroup; i += kLanes) {
    store(scores + i, tanh(load(scores + i) * broadcast(rows.cap_scale)));
  }
}

// Scores of positions that the row does not see become -inf; the highest times `scale` goes to rows.tile.
[[gnu::always_inline]] inline void find_highest(const AttendRows& rows, int64_t row, const Seen& seen) {
  auto* scores = reinterpret_cast<float*>(rows.scores + row * kTileTokens * 4);
  const auto mask = [&](int64_t g) {
    store(scores + g * kGroup, masked(load(scores + g * kGroup), g * kGroup, seen.low, seen.high));
  };
  if (seen.from < seen.to && seen.low % kGroup != 0) mask(seen.from);
  if (seen.from < seen.to && seen.high % kGroup != 0) mask(seen.to - 1);
  F32x16 highest = broadcast(-__builtin_inff()), other = highest;
  int64_t g = seen.from;
  for (; g + 2 <= seen.to; g += 2) {
    highest = max(highest, load(scores + g * kGroup));
    other = max(other, load(scores + (g + 1) * kGroup));
  }
  if (g < seen.to) highest = max(highest, load(scores + g * kGroup));
  highest = max(highest, other);
  rows.tile.highest[row] = seen.from < seen.to ? largest(highest) * rows.scale : kLowest;
}

// Scores to weights, which are zero where the row does not see.
template <class Kv>
[[gnu::always_inline]] inline void soften(const AttendRows& rows, int64_t row, const Seen& seen) {
  constexpr int64_t kBytes = kGroup / Kv::kTokens * Kv::kWeightBytes;
  std::byte* memory = rows.scores + row * kTileTokens * 4;
  const auto* scores = reinterpret_cast<const float*>(memory);
  const F32x16 scale = broadcast(rows.scale), offset = broadcast(-rows.tile.highest[row]);
  F32x16 totals = zero();
  for (int64_t g = seen.first; g < seen.from; ++g) memset(memory + g * kBytes, 0, kBytes);
  int64_t g = seen.from;
  for (; g + 2 <= seen.to; g += 2) {
    F32x16 p[2];
    QUIRE_UNROLL for (int i = 0; i < 2; ++i) p[i] = fma(load(scores + (g + i) * kGroup), scale, offset);
    exp2_of_non_positive(p);
    QUIRE_UNROLL for (int i = 0; i < 2; ++i) totals = totals + p[i];
    Kv::store_weights(memory + g * kBytes, p[0], p[1]);
  }
  if (g < seen.to) {
    F32x16 p[1] = {fma(load(scores + g * kGroup), scale, offset)};
    exp2_of_non_positive(p);
    totals = totals + p[0];
    Kv::store_weights(memory + g * kBytes, p[0]);
  }
  for (g = seen.to; g < seen.end; ++g) memset(memory + g * kBytes, 0, kBytes);
  store(rows.tile.totals + row * kLanes, totals);
}

// int8: scores to weights times the values' scales, as int16 with a common scale, which is returned.
[[gnu::always_inline]] inline float soften_scaled(const AttendRows& rows, int64_t row, const Seen& seen,
                                                  const float* const* scales, int64_t block_size) {
  std::byte* memory = rows.scores + row * kTileTokens * 4;
  auto* scores = reinterpret_cast<float*>(memory);
  const F32x16 scale = broadcast(rows.scale), offset = broadcast(-rows.tile.highest[row]);
  F32x16 totals = zero(), most = zero(), check = zero();
  int64_t g = seen.from;
  const auto add = [&](F32x16 p) {
    // Where the weight is zero the scale may be garbage. A NaN is lost by max.
    const F32x16 scaled = select_less(zero(), p, p * load(scales[g] + block_size), zero());
    totals = totals + p;
    most = max(scaled, most);
    check = fma(scaled, zero(), check);
    store(scores + g * kGroup, scaled);
    ++g;
  };
  while (g + 2 <= seen.to) {
    F32x16 p[2];
    QUIRE_UNROLL for (int i = 0; i < 2; ++i) p[i] = fma(load(scores + (g + i) * kGroup), scale, offset);
    exp2_of_non_positive(p);
    QUIRE_UNROLL for (int i = 0; i < 2; ++i) add(p[i]);
  }
  if (g < seen.to) {
    F32x16 p[1] = {fma(load(scores + g * kGroup), scale, offset)};
    exp2_of_non_positive(p);
    add(p[0]);
  }
  store(rows.tile.totals + row * kLanes, totals);
  const float highest = largest(most);
  const F32x16 inverse = broadcast(highest > 0.0f ? 32767.0f / highest : 0.0f);
  constexpr int64_t kBytes = kGroup * 2;
  for (g = seen.first; g < seen.from; ++g) memset(memory + g * kBytes, 0, kBytes);
  for (g = seen.from; g < seen.to; ++g) {
    store_shorts(memory + g * kBytes, round_to_int(load(scores + g * kGroup) * inverse));
  }
  for (g = seen.to; g < seen.end; ++g) memset(memory + g * kBytes, 0, kBytes);
  return highest / 32767.0f + sum(check);
}

}  // namespace
}  // namespace quire
