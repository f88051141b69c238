// Attention of many rows on AMX's tile registers (isa/tiles.h): queries, keys, weights and values are bf16, scores and
// sums fp32. Where a request has few rows in a step, attend_tile.h is as fast, and more exact.
//
// Rows go in blocks of 16 through tiles of 128 positions. A row's weights are 2^(score - r) for a reference r: its first
// tile's highest score, replaced only where a later one is higher by more than kSlack, so that sums are seldom
// scaled. What a row gets depends on its own scores and on the places of tiles and segments only.
#pragma once
#include "ops/attend_rows.h"
#include "ops/attend_softmax.h"
#include "ops/attend_tile.h"

#if defined(QUIRE_TILES)
#include <immintrin.h>

#include "isa/tiles.h"

namespace quire {
namespace {

constexpr int64_t kBlockRows = 16, kStepDims = 32, kStepTokens = 32;
constexpr float kSlack = 8.0f;
constexpr int64_t kTileSteps = kTileTokens / kStepTokens;

// Where one item's rows and one tile's keys and values lie in scratch.
struct AmxRows {
  int64_t key_steps;     // of 32 dimensions
  int64_t value_groups;  // of 16 dimensions
  std::byte* queries;    // bf16 [blocks][key_steps][16][32]
  float* scores;         // [16][kTileTokens] of one block
  uint16_t* weights;     // [16][kTileTokens] bf16
  std::byte* keys;       // bf16 [kTileGroups][key_steps * 16][16][2], if they cannot be read in place
  std::byte* values;     // bf16 [kTileTokens / 2][value_groups * 16][2], likewise
  std::byte* edges;      // bf16 [2][16][value_groups * 16][2]: steps of which a block sees a part
};

// Values of 32 tokens: rows of pairs.
struct ValueStep {
  const std::byte* values;
  int64_t stride;
};

inline AmxRows lay_out_amx(const AttendOp& op, std::byte* memory, AttendRows* all) {
  const int64_t most = most_amx_rows(op);
  all->stride = padded_head_size(op.kv.head_size);
  all->lows = take<int32_t>(&memory, most * 4);
  all->highs = take<int32_t>(&memory, most * 4);
  all->tile = partial_at(take<std::byte>(&memory, partial_bytes(most, all->stride)), most);
  all->total = partial_at(take<std::byte>(&memory, partial_bytes(most, all->stride)), most);
  set_scales(op, all);
  AmxRows rows{};
  rows.key_steps = (op.kv.head_size + kStepDims - 1) / kStepDims;
  rows.value_groups = padded_head_size(op.kv.head_size) / kLanes;
  rows.queries = take<std::byte>(&memory, most * rows.key_steps * 64);
  rows.scores = take<float>(&memory, kBlockRows * kTileTokens * 4);
  rows.weights = take<uint16_t>(&memory, kBlockRows * kTileTokens * 2);
  rows.keys = take<std::byte>(&memory, kTileTokens * rows.key_steps * 64);
  rows.values = take<std::byte>(&memory, kTileTokens * rows.value_groups * 32);
  rows.edges = take<std::byte>(&memory, 2 * kStepTokens * rows.value_groups * 32);
  return rows;
}

inline void load_rows_amx(const AttendOp& op, const Step& step, const Item& item, const AmxRows& amx,
                          AttendRows* rows) {
  const int64_t width = op.kv.head_size, padded = amx.key_steps * kStepDims;
  const int64_t blocks = (item.num_rows + kBlockRows - 1) / kBlockRows;
  rows->count = item.num_rows;
  RowPlace place = first_place(op, step, item);
  for (int64_t row = 0; row < blocks * kBlockRows; ++row) {
    std::byte* to = amx.queries + row / kBlockRows * kBlockRows * padded * 2 + row % kBlockRows * kTileRowBytes;
    if (row >= item.num_rows) {
      rows->lows[row] = rows->lows[row - 1];
      rows->highs[row] = rows->highs[row - 1];
      for (int64_t i = 0; i < amx.key_steps; ++i) memset(to + i * kBlockRows * kTileRowBytes, 0, kTileRowBytes);
      continue;
    }
    const int64_t position = step.positions[place.token], start = position - op.window + 1;
    rows->lows[row] = static_cast<int32_t>(op.window == 0 || start < 0 ? 0 : start);
    rows->highs[row] = static_cast<int32_t>(position + 1);
    float* q = amx.scores;
    memcpy(q, query_at(op, place), static_cast<size_t>(width) * sizeof(float));
    memset(q + width, 0, static_cast<size_t>(padded - width) * sizeof(float));
    for (int64_t i = 0; i < padded; i += kLanes) {
      std::byte* line = to + i / kStepDims * kBlockRows * kTileRowBytes + i % kStepDims * 2;
      store_bf16(reinterpret_cast<uint16_t*>(line), load(q + i));
    }
    place.advance();
  }
}

// --- Keys and values as second operands ---------------------------------------------------------------------------

// Bytes b0 … b3 of each lane, plus 128, as bf16 pairs (b0, b1) and (b2, b3): exact.
inline void widen_keys(const std::byte* from, std::byte* to) {
  const __m512i x = _mm512_loadu_si512(from), low = _mm512_set1_epi32(255);
  __m512i bits[4];
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(x, 8 * i), low);
    bits[i] = _mm512_castps_si512(_mm512_sub_ps(_mm512_cvtepi32_ps(byte), _mm512_set1_ps(128.0f)));
  }
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  QUIRE_UNROLL for (int i = 0; i < 2; ++i) {
    const __m512i pair = _mm512_or_si512(_mm512_srli_epi32(bits[2 * i], 16), _mm512_and_si512(bits[2 * i + 1], high));
    _mm512_storeu_si512(to + i * 64, pair);
  }
}
// 32 signed bytes as bf16.
inline void widen_values(const std::byte* from, std::byte* to) {
  const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16));
  const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 16));
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                          _mm512_and_si512(_mm512_castps_si512(odd), high)));
}

// The keys of a tile's groups: in place, or with zeros up to whole steps in scratch.
inline void make_key_steps(const KvLayer& kv, const TileKeys& tile, const AmxRows& amx, const std::byte** keys) {
  const bool in_place = kv.format == KvFormat::bf16 && kv.head_size % kStepDims == 0;
  const int64_t bytes = amx.key_steps * kBlockRows * kTileRowBytes;
  for (int64_t g = tile.first; g < tile.end; ++g) {
    keys[g] = tile.keys[g];
    if (in_place) continue;
    std::byte* to = amx.keys + g * bytes;
    int64_t used = kv.head_size / 2 * kTileRowBytes;
    if (kv.format == KvFormat::bf16) {
      memcpy(to, tile.keys[g], static_cast<size_t>(used));
    } else {
      const int64_t quads = (kv.head_size + 3) / 4;
      for (int64_t i = 0; i < quads; ++i) widen_keys(tile.keys[g] + i * 64, to + i * 128);
      used = quads * 128;
    }
    memset(to + used, 0, static_cast<size_t>(bytes - used));
    keys[g] = to;
  }
}

// The values of tokens low … high - 1 of a group, as rows of value_groups * 64 bytes; zeros where it has no others.
inline void copy_values(const KvLayer& kv, const std::byte* from, int64_t low, int64_t high, const AmxRows& amx,
                        std::byte* to) {
  const int64_t stride = amx.value_groups * 64, row_bytes = kv.head_size * 2 * kv_value_bytes(kv.format);
  for (int64_t pair = 0; pair < kGroup / 2; ++pair, from += row_bytes, to += stride) {
    const bool first = low <= 2 * pair && 2 * pair < high, second = low <= 2 * pair + 1 && 2 * pair + 1 < high;
    if (!first && !second) {
      memset(to, 0, static_cast<size_t>(stride));
      continue;
    }
    if (kv.format == KvFormat::bf16) {
      memcpy(to, from, static_cast<size_t>(kv.head_size * 4));
    } else {
      int64_t i = 0;
      for (; i + kLanes <= kv.head_size; i += kLanes) widen_values(from + i * 2, to + i * 4);
      if (i < kv.head_size) {
        std::byte last[32] = {};
        memcpy(last, from + i * 2, static_cast<size_t>((kv.head_size - i) * 2));
        widen_values(last, to + i * 4);
      }
    }
    memset(to + kv.head_size * 4, 0, static_cast<size_t>(stride - kv.head_size * 4));
    if (first && second) continue;
    const __m512i keep = _mm512_set1_epi32(static_cast<int32_t>(first ? 0x0000ffffu : 0xffff0000u));
    for (int64_t i = 0; i < stride; i += 64) {
      _mm512_storeu_si512(to + i, _mm512_and_si512(_mm512_loadu_si512(to + i), keep));
    }
  }
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The values of step `index` of a tile, of which tokens low … high - 1 (of the tile) may be read, in `to`.
inline void copy_step(const KvLayer& kv, const TileKeys& tile, int64_t index, int64_t low, int64_t high,
                      const AmxRows& amx, std::byte* to) {
  for (int64_t g = 2 * index; g < 2 * index + 2; ++g, to += kGroup / 2 * amx.value_groups * 64) {
    const bool has = g >= tile.first && g < tile.end;
    const int64_t begin = clamp(low - g * kGroup, 0, kGroup), end = clamp(high - g * kGroup, 0, kGroup);
    copy_values(kv, tile.values[has ? g : tile.first], begin, has ? end : 0, amx, to);
  }
}

// A tile's steps of which the item sees all tokens. Others are copied by each block.
inline void make_value_steps(const KvLayer& kv, const TileKeys& tile, int64_t low, int64_t high, const AmxRows& amx,
                             ValueStep* steps) {
  const bool in_place = kv.format == KvFormat::bf16 && kv.head_size % kLanes == 0;
  const int64_t group_bytes = value_group_bytes(kv.format, kv.head_size);
  for (int64_t i = 0; i < kTileSteps; ++i) {
    if (low > i * kStepTokens || high < (i + 1) * kStepTokens) continue;
    if (in_place && tile.values[2 * i + 1] == tile.values[2 * i] + group_bytes) {
      steps[i] = {tile.values[2 * i], kv.head_size * 4};
      continue;
    }
    std::byte* to = amx.values + i * kStepTokens * amx.value_groups * 32;
    copy_step(kv, tile, i, low, high, amx, to);
    steps[i] = {to, amx.value_groups * 64};
  }
}

// --- Products -----------------------------------------------------------------------------------------------------

// kCount tiles of sums, from tile 0 on, of one tile of rows (4) by second operands (5 … 7 in turn).
template <int kCount, int kAt = 0>
[[gnu::always_inline]] inline void multiply_row_tile(const std::byte* const (&operands)[4], int64_t stride) {
  if constexpr (kAt < kCount) {
    tile_load<5 + kAt % 3>(operands[kAt], stride);
    tile_dot_bf16<kAt, 4, 5 + kAt % 3>();
    multiply_row_tile<kCount, kAt + 1>(operands, stride);
  }
}
template <int kCount, int kAt = 0>
[[gnu::always_inline]] inline void zero_sums() {
  if constexpr (kAt < kCount) tile_zero<kAt>(), zero_sums<kCount, kAt + 1>();
}
template <int kCount, int kAt = 0>
[[gnu::always_inline]] inline void load_tiles(const float* from, int64_t stride) {
  if constexpr (kAt < kCount) tile_load<kAt>(from + kAt * kLanes, stride), load_tiles<kCount, kAt + 1>(from, stride);
}
template <int kCount, int kAt = 0>
[[gnu::always_inline]] inline void store_tiles(float* to, int64_t stride) {
  if constexpr (kAt < kCount) tile_store<kAt>(to + kAt * kLanes, stride), store_tiles<kCount, kAt + 1>(to, stride);
}

// Scores of one block by kCount groups of 16 keys.
template <int kCount>
void score_groups(const std::byte* queries, int64_t key_steps, const std::byte* const* keys, float* scores) {
  zero_sums<kCount>();
  for (int64_t i = 0; i < key_steps; ++i) {
    constexpr int64_t kBytes = kBlockRows * kTileRowBytes;
    const std::byte* operands[4] = {};
    QUIRE_UNROLL for (int g = 0; g < kCount; ++g) operands[g] = keys[g] + i * kBytes;
    tile_load<4>(queries + i * kBytes, kTileRowBytes);
    multiply_row_tile<kCount>(operands, kTileRowBytes);
  }
  store_tiles<kCount>(scores, kTileTokens * 4);
}

// Weights of some steps by kCount groups of 16 dimensions, added to a block's sums.
template <int kCount>
void weigh_groups(const uint16_t* weights, const ValueStep* steps, int64_t first, int64_t end, int64_t offset,
                  float* sums, int64_t stride) {
  load_tiles<kCount>(sums, stride * 4);
  for (int64_t i = first; i < end; ++i) {
    const std::byte* operands[4] = {};
    QUIRE_UNROLL for (int c = 0; c < kCount; ++c) operands[c] = steps[i].values + offset + c * 64;
    tile_load<4>(weights + i * kStepTokens, kTileTokens * 2);
    multiply_row_tile<kCount>(operands, steps[i].stride);
  }
  store_tiles<kCount>(sums, stride * 4);
}

// --- Softmax ------------------------------------------------------------------------------------------------------

// The largest lane of each of 16 vectors.
inline __m512 largest_of_each(const __m512 (&x)[16]) {
  __m512 a[8], b[4];
  QUIRE_UNROLL for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_max_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  }
  QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512d first = _mm512_castps_pd(a[2 * i]), second = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  const auto halves = [](__m512 first, __m512 second) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
  };
  return halves(halves(b[0], b[1]), halves(b[2], b[3]));
}

// 2^x * v rounded to bf16 (half up), for two vectors; 2^x is added to `total`. 2^(x - floor x) is a polynomial with a
// relative error of 7.5e-5, beside the rounding's 4e-3. Where a score is -inf, with kMasked, the weight is zero.
struct Weights {
  __m512 scale, offset;
};
template <bool kMasked, bool kScaled>
[[gnu::always_inline]] inline __m512i soften_pair(const float* scores, const Weights& w, const float* factors0,
                                                  const float* factors1, __m512& total) {
  __m512i bits[2];
  const float* factors[2] = {factors0, factors1};
  QUIRE_UNROLL for (int i = 0; i < 2; ++i) {
    const __m512 s = _mm512_loadu_ps(scores + i * kLanes);
    // Below -125 the result would be denormal, which takes the processor a hundred times as long. A NaN stays one.
    const __m512 x = _mm512_max_ps(_mm512_set1_ps(-125.0f), _mm512_fmadd_ps(s, w.scale, w.offset));
    const __m512 r = _mm512_reduce_ps(x, 1);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07802452f), r, _mm512_set1_ps(0.22606716f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69583354f));
    p = _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992522f)), x);
    __mmask16 seen = 0xffff;
    if constexpr (kMasked) {
      seen = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
      total = _mm512_mask_add_ps(total, seen, total, p);
    } else {
      total = _mm512_add_ps(total, p);
    }
    if constexpr (kScaled) p = _mm512_mul_ps(p, _mm512_loadu_ps(factors[i]));
    bits[i] = _mm512_maskz_add_epi32(seen, _mm512_castps_si512(p), _mm512_set1_epi32(0x8000));
  }
  alignas(64) static constexpr uint16_t kHighHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                           23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                           45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(bits[0], _mm512_load_si512(kHighHalves), bits[1]);
}

template <bool kMasked, bool kScaled>
void soften_block(const AttendRows& rows, const AmxRows& amx, int64_t row, int64_t first, int64_t end,
                  const float* const* scales, int64_t block_size) {
  for (int64_t r = 0; r < kBlockRows; ++r) {
    const Weights w = {_mm512_set1_ps(rows.scale), _mm512_set1_ps(-rows.tile.highest[row + r])};
    float* totals = rows.tile.totals + (row + r) * kLanes;
    __m512 total = _mm512_loadu_ps(totals);
    for (int64_t i = first; i < end; ++i) {
      const float *factors0 = nullptr, *factors1 = nullptr;
      if constexpr (kScaled) factors0 = scales[2 * i] + block_size, factors1 = scales[2 * i + 1] + block_size;
      const int64_t at = r * kTileTokens + i * kStepTokens;
      const __m512i pair = soften_pair<kMasked, kScaled>(amx.scores + at, w, factors0, factors1, total);
      _mm512_storeu_si512(amx.weights + at, pair);
    }
    _mm512_storeu_ps(totals, total);
  }
}

// The highest scores of a block's rows become their references where those are too low; sums follow.
inline void raise_references(const AttendRows& rows, int64_t row, __m512 highest) {
  float* references = rows.tile.highest + row;
  const F32x16 before = load(references);
  __mmask16 raised = _mm512_cmp_ps_mask(highest, _mm512_add_ps(before.v, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
  if (raised == 0) return;
  const F32x16 after = {_mm512_mask_mov_ps(before.v, raised, highest)};
  F32x16 factors[1] = {before - after};
  exp2_of_non_positive(factors);
  float each[kLanes];
  store(each, factors[0]);
  store(references, after);
  for (; raised != 0; raised = static_cast<__mmask16>(raised & (raised - 1))) {
    const int64_t r = __builtin_ctz(raised);
    const F32x16 factor = broadcast(each[r]);
    float* totals = rows.tile.totals + (row + r) * kLanes;
    store(totals, load(totals) * factor);
    float* sums = rows.tile.sums + (row + r) * rows.stride;
    for (int64_t i = 0; i < rows.stride; i += kLanes) store(sums + i, load(sums + i) * factor);
  }
}

// --- Blocks and tiles ---------------------------------------------------------------------------------------------

struct AmxTile {
  int64_t begin;  // position
  TileKeys places;
  const std::byte* keys[kTileGroups];
  ValueStep steps[kTileSteps];
};

// The rows of a block by the tile's groups first … end - 1.
inline void score_block_amx(const AmxRows& amx, const std::byte* queries, const AmxTile& tile, int64_t first,
                            int64_t end) {
  for (int64_t g = first; g < end; g += 4) {
    const auto score = end - g >= 4   ? score_groups<4>
                       : end - g == 3 ? score_groups<3>
                       : end - g == 2 ? score_groups<2>
                                      : score_groups<1>;
    score(queries, amx.key_steps, tile.keys + g, amx.scores + g * kGroup);
  }
}

inline void attend_block(const AttendOp& op, const AttendRows& rows, const AmxRows& amx, int64_t row, AmxTile& tile) {
  const int64_t last = row + kBlockRows - 1;
  const int64_t low = clamp(rows.lows[row] - tile.begin, 0, kTileTokens);
  const int64_t high = clamp(rows.highs[last] - tile.begin, 0, kTileTokens);
  if (low >= high) return;
  const int64_t from = low / kGroup, to = (high + kGroup - 1) / kGroup;
  const int64_t first = low / kStepTokens, end = (high + kStepTokens - 1) / kStepTokens;
  score_block_amx(amx, amx.queries + row * amx.key_steps * kTileRowBytes, tile, from, to);
  const bool is_scaled = op.kv.format == KvFormat::i8;
  const bool masked = rows.lows[last] - tile.begin > first * kStepTokens ||
                      rows.highs[row] - tile.begin < end * kStepTokens;
  __m512 tops[kBlockRows];
  for (int64_t r = 0; r < kBlockRows; ++r) {
    float* scores = amx.scores + r * kTileTokens;
    if (masked || is_scaled || rows.cap_scale != 0.0f) {
      const int64_t row_low = rows.lows[row + r] - tile.begin, row_high = rows.highs[row + r] - tile.begin;
      for (int64_t g = 2 * first; g < 2 * end; ++g) {
        F32x16 x = g < from || g >= to ? zero() : load(scores + g * kGroup);
        if (is_scaled && g >= from && g < to) x = x * load(tile.places.scales[g]);
        if (rows.cap_scale != 0.0f) x = tanh(x * broadcast(rows.cap_scale));
        store(scores + g * kGroup, masked ? quire::masked(x, g * kGroup, row_low, row_high) : x);
      }
    }
    tops[r] = _mm512_loadu_ps(scores + 2 * first * kGroup);
    for (int64_t g = 2 * first + 1; g < 2 * end; ++g) {
      tops[r] = _mm512_max_ps(tops[r], _mm512_loadu_ps(scores + g * kGroup));
    }
  }
  raise_references(rows, row, _mm512_mul_ps(largest_of_each(tops), _mm512_set1_ps(rows.scale)));
  const auto soften = is_scaled ? (masked ? soften_block<true, true> : soften_block<false, true>)
                                : (masked ? soften_block<true, false> : soften_block<false, false>);
  soften(rows, amx, row, first, end, tile.places.scales, op.kv.block_size);
  // Values that no row of the block sees may be NaN: zero times them would be, too.
  ValueStep steps[kTileSteps];
  memcpy(steps, tile.steps, sizeof steps);
  std::byte* edge = amx.edges;
  for (int64_t i = first; i < end; i += end - 1 > first && i == first ? end - 1 - first : 1) {
    if (low <= i * kStepTokens && high >= (i + 1) * kStepTokens) continue;
    copy_step(op.kv, tile.places, i, low, high, amx, edge);
    steps[i] = {edge, amx.value_groups * 64};
    edge += kStepTokens * amx.value_groups * 32;
  }
  float* sums = rows.tile.sums + row * rows.stride;
  for (int64_t c = 0; c < amx.value_groups; c += 4) {
    const int64_t left = amx.value_groups - c;
    const auto weigh = left >= 4   ? weigh_groups<4>
                       : left == 3 ? weigh_groups<3>
                       : left == 2 ? weigh_groups<2>
                                   : weigh_groups<1>;
    weigh(amx.weights, steps, first, end, c * 64, sums + c * kLanes, rows.stride);
  }
}

// The items of one thread, one at a time, and the tile registers, configured before the first of them.
class AmxItems {
 public:
  AmxItems(const AttendOp& op, const Context& context)
      : op_(op), step_(*context.step), amx_(lay_out_amx(op, context.scratch, &rows)) {}
  ~AmxItems() {
    if (configured_) release_tiles();
  }
  AmxItems(const AmxItems&) = delete;
  AmxItems& operator=(const AmxItems&) = delete;

  void load(const Item& item) {
    constexpr TileShape kAll[] = {{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}};
    if (!configured_) configure_tiles(kAll);
    configured_ = true;
    load_rows_amx(op_, step_, item, amx_, &rows);
  }
  // One segment's result, to rows.tile.
  void attend(const Item& item, int64_t segment) const {
    const int64_t num_rows = (rows.count + kBlockRows - 1) / kBlockRows * kBlockRows;
    for (int64_t r = 0; r < num_rows; r += kLanes) store(rows.tile.highest + r, broadcast(kLowest));
    memset(rows.tile.totals, 0, static_cast<size_t>(num_rows * kLanes) * sizeof(float));
    memset(rows.tile.sums, 0, static_cast<size_t>(num_rows * rows.stride) * sizeof(float));
    const int64_t begin = segment * item.tile_tokens, end = begin + item.tile_tokens;
    const int64_t low = item.low > begin ? item.low : begin, high = item.high < end ? item.high : end;
    for (int64_t i = low / kTileTokens; i * kTileTokens < high; ++i) {
      AmxTile tile;
      tile.begin = i * kTileTokens;
      find_keys(op_.kv, step_.block_table(op_.kv.group, item.request), item, i, &tile.places);
      make_key_steps(op_.kv, tile.places, amx_, tile.keys);
      make_value_steps(op_.kv, tile.places, item.low - tile.begin, item.high - tile.begin, amx_, tile.steps);
      for (int64_t row = 0; row < num_rows; row += kBlockRows) attend_block(op_, rows, amx_, row, tile);
    }
  }

  AttendRows rows{};

 private:
  const AttendOp& op_;
  const Step& step_;
  AmxRows amx_;
  bool configured_ = false;
};

}  // namespace
}  // namespace quire

#else

namespace quire {
namespace {

// Other instruction sets have no items for it.
class AmxItems {
 public:
  AmxItems(const AttendOp&, const Context&) {}
  void load(const Item&) {}
  void attend(const Item&, int64_t) const {}

  AttendRows rows{};
};

}  // namespace
}  // namespace quire
#endif
