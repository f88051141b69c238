// Attention of many rows on AMX's tile registers (isa/tiles.h): queries, keys, weights and values are bf16, scores and
// sums fp32. With few rows attend_tile.h is faster: keys and values that come from memory pass through vector registers
// at 12.4 GB/s a thread, through tile registers at 9.6 (3 rows, a Xeon with AMX).
//
// Rows go in blocks of 32 (two tile registers, so that each loaded operand has two products) through tiles of 128
// positions. A row's weights are 2^(score - r) for a reference r: its first tile's highest score, replaced only where a
// later one is higher by more than kSlack, so that sums are seldom scaled. What a row gets depends on its own scores
// and on the places of tiles and segments only.
#pragma once
#include "ops/attend_rows.h"
#include "ops/attend_softmax.h"
#include "ops/attend_tile.h"

#if defined(QUIRE_TILES)
#include <immintrin.h>

#include "isa/tiles.h"

namespace quire {
namespace {

constexpr int64_t kTileOfRows = 16, kBlockRows = 2 * kTileOfRows, kStepDims = 32, kStepTokens = 32;
constexpr float kSlack = 8.0f;
constexpr int64_t kTileSteps = kTileTokens / kStepTokens;

// Where one item's rows and one tile's keys and values lie in scratch.
struct AmxRows {
  int64_t key_steps;     // of 32 dimensions
  int64_t value_groups;  // of 16 dimensions
  int64_t block_rows;    // of all blocks but the last: kBlockRows, or 16 where scratch has no room for more
  std::byte* queries;    // bf16 [rows / 16][key_steps][16][32]
  float* scores[2];      // [block_rows][kTileTokens] of two blocks
  uint16_t* weights[2];  // [block_rows][kTileTokens] bf16
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
  rows.block_rows = op.kv.head_size <= 256 ? kBlockRows : kTileOfRows;
  rows.queries = take<std::byte>(&memory, most * rows.key_steps * 64);
  for (int i = 0; i < 2; ++i) {
    rows.scores[i] = take<float>(&memory, rows.block_rows * kTileTokens * 4);
    rows.weights[i] = take<uint16_t>(&memory, rows.block_rows * kTileTokens * 2);
  }
  rows.keys = take<std::byte>(&memory, kTileTokens * rows.key_steps * 64);
  rows.values = take<std::byte>(&memory, kTileTokens * rows.value_groups * 32);
  rows.edges = take<std::byte>(&memory, 2 * kStepTokens * rows.value_groups * 32);
  return rows;
}

inline void load_rows_amx(const AttendOp& op, const Step& step, const Item& item, const AmxRows& amx,
                          AttendRows* rows) {
  const int64_t width = op.kv.head_size, padded = amx.key_steps * kStepDims;
  const int64_t tiles = (item.num_rows + kTileOfRows - 1) / kTileOfRows;
  rows->count = item.num_rows;
  constexpr int64_t kAhead = 8;
  RowPlace place = first_place(op, step, item), ahead = place;
  for (int64_t i = 0; i < kAhead; ++i) ahead.advance();
  for (int64_t row = 0; row < tiles * kTileOfRows; ++row) {
    std::byte* to = amx.queries + row / kTileOfRows * kTileOfRows * padded * 2 + row % kTileOfRows * kTileRowBytes;
    if (row >= item.num_rows) {
      rows->lows[row] = rows->lows[row - 1];
      rows->highs[row] = rows->highs[row - 1];
      for (int64_t i = 0; i < amx.key_steps; ++i) memset(to + i * kTileOfRows * kTileRowBytes, 0, kTileRowBytes);
      continue;
    }
    const int64_t position = step.positions[place.token], start = position - op.window + 1;
    rows->lows[row] = static_cast<int32_t>(op.window == 0 || start < 0 ? 0 : start);
    rows->highs[row] = static_cast<int32_t>(position + 1);
    const float* q = query_at(op, place);
    if (row + kAhead < item.num_rows) {
      for (int64_t i = 0; i < width; i += kLanes) prefetch_l1(query_at(op, ahead) + i);
      ahead.advance();
    }
    if (width % kStepDims != 0) {
      float* whole = amx.scores[0];
      memcpy(whole, q, static_cast<size_t>(width) * sizeof(float));
      memset(whole + width, 0, static_cast<size_t>(padded - width) * sizeof(float));
      q = whole;
    }
    for (int64_t i = 0; i < padded; i += kLanes) {
      std::byte* line = to + i / kStepDims * kTileOfRows * kTileRowBytes + i % kStepDims * 2;
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
// 32 integers of at most 8 bits as bf16.
inline __m512i widen_shorts(__m512i x) {
  const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16));
  const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 16));
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                         _mm512_and_si512(_mm512_castps_si512(odd), high));
}

// The keys of a tile's groups: in place, or with zeros up to whole steps in scratch.
inline void make_key_steps(const KvLayer& kv, const TileKeys& tile, const AmxRows& amx, const std::byte** keys) {
  const bool in_place = kv.format == KvFormat::bf16 && kv.head_size % kStepDims == 0;
  const int64_t bytes = amx.key_steps * kTileOfRows * kTileRowBytes;
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
  const int64_t value_bytes = kv_value_bytes(kv.format);
  for (int64_t pair = 0; pair < kGroup / 2; ++pair, from += kv.head_size * 2 * value_bytes) {
    const bool first = low <= 2 * pair && 2 * pair < high, second = low <= 2 * pair + 1 && 2 * pair + 1 < high;
    const __m512i keep = _mm512_set1_epi32(static_cast<int32_t>((first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u)));
    for (int64_t i = 0; i < amx.value_groups * kLanes; i += kLanes, to += 64) {
      const int64_t left = kv.head_size - i;
      const auto lanes = static_cast<__mmask16>(left < kLanes ? (1 << left) - 1 : 0xffff);
      const std::byte* at = from + i * 2 * value_bytes;
      const __m512i values = kv.format == KvFormat::bf16
                                 ? _mm512_maskz_loadu_epi32(lanes, at)
                                 : widen_shorts(_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi16(lanes, at)));
      _mm512_storeu_si512(to, _mm512_and_si512(values, keep));
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

// Tiles of sums: kRows of rows by kColumns, at 2 * row + column.
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void zero_sums() {
  tile_zero<0>();
  if constexpr (kColumns == 2) tile_zero<1>();
  if constexpr (kRows == 2) tile_zero<2>();
  if constexpr (kRows == 2 && kColumns == 2) tile_zero<3>();
}
template <int kRows, int kColumns>
void load_sums(const float* from, int64_t stride) {
  tile_load<0>(from, stride * 4);
  if constexpr (kColumns == 2) tile_load<1>(from + kLanes, stride * 4);
  if constexpr (kRows == 2) tile_load<2>(from + kTileOfRows * stride, stride * 4);
  if constexpr (kRows == 2 && kColumns == 2) tile_load<3>(from + kTileOfRows * stride + kLanes, stride * 4);
}
template <int kRows, int kColumns>
void store_sums(float* to, int64_t stride) {
  tile_store<0>(to, stride * 4);
  if constexpr (kColumns == 2) tile_store<1>(to + kLanes, stride * 4);
  if constexpr (kRows == 2) tile_store<2>(to + kTileOfRows * stride, stride * 4);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(to + kTileOfRows * stride + kLanes, stride * 4);
}
// sums += rows by columns: the second tile of rows is `rows_apart` bytes after the first.
template <int kRows, int kColumns>
void multiply_tiles(const std::byte* rows, int64_t row_stride, int64_t rows_apart, const std::byte* first,
                    const std::byte* second, int64_t stride) {
  tile_load<6>(first, stride);
  tile_load<4>(rows, row_stride);
  tile_dot_bf16<0, 4, 6>();
  if constexpr (kRows == 2) {
    tile_load<5>(rows + rows_apart, row_stride);
    tile_dot_bf16<2, 5, 6>();
  }
  if constexpr (kColumns == 2) {
    tile_load<7>(second, stride);
    tile_dot_bf16<1, 4, 7>();
    if constexpr (kRows == 2) tile_dot_bf16<3, 5, 7>();
  }
}

struct AmxTile {
  int64_t begin;  // position
  TileKeys places;
  const std::byte* keys[kTileGroups];
  ValueStep steps[kTileSteps];
};

// Some rows and what they see of a tile.
struct AmxBlock {
  int64_t row;         // of the item
  int64_t count;       // kTileOfRows or kBlockRows
  int64_t low, high;   // tokens of the tile that some row sees
  int64_t from, to;    // groups with such tokens
  int64_t first, end;  // steps with such tokens
  bool masked;         // some row does not see all tokens of these steps
  const std::byte* queries;
  float* scores;
  uint16_t* weights;
  float* sums;
  ValueStep steps[kTileSteps];

  bool sees_any() const { return low < high; }
};

// Products of one block and a tile, in units of a few tile instructions, which overlap with another block's softmax.
class Products {
 public:
  Products(const AmxRows& amx, const AmxTile& tile, int64_t sums_stride)
      : amx_(amx), tile_(tile), sums_stride_(sums_stride) {}

  // What `advance` computes from now on: scores of one block, then weighted values of another; either may be null.
  // Returns the number of units.
  int64_t start(const AmxBlock* scores, const AmxBlock* weighs) {
    scores_ = scores, weighs_ = weighs;
    if (scores_ != nullptr) {
      column_ = scores_->from, at_ = 0;
    } else if (weighs_ != nullptr) {
      column_ = 0, at_ = weighs_->first;
    }
    int64_t units = 0;
    if (scores_ != nullptr) units += (scores_->to - scores_->from + 1) / 2 * (amx_.key_steps + 1);
    if (weighs_ != nullptr) units += (amx_.value_groups + 1) / 2 * (weighs_->end - weighs_->first + 1);
    return units;
  }
  void advance() {
    if (scores_ != nullptr) {
      advance_scores();
    } else if (weighs_ != nullptr) {
      advance_values();
    }
  }
  void finish() {
    while (scores_ != nullptr || weighs_ != nullptr) advance();
  }

  int64_t query_bytes() const { return amx_.key_steps * kTileRowBytes; }

 private:
  struct Kernels {
    void (*load)(const float*, int64_t);
    void (*store)(float*, int64_t);
    void (*multiply)(const std::byte*, int64_t, int64_t, const std::byte*, const std::byte*, int64_t);
    void (*zero)();
  };
  template <int kRows, int kColumns>
  static constexpr Kernels kernels() {
    return {load_sums<kRows, kColumns>, store_sums<kRows, kColumns>, multiply_tiles<kRows, kColumns>,
            [] { zero_sums<kRows, kColumns>(); }};
  }
  static const Kernels& kernels_for(const AmxBlock& block, int64_t columns) {
    static constexpr Kernels kAll[2][2] = {{kernels<1, 1>(), kernels<1, 2>()}, {kernels<2, 1>(), kernels<2, 2>()}};
    return kAll[block.count / kBlockRows][columns > 1 ? 1 : 0];
  }

  // Two groups of 16 dimensions by one step of 32 tokens; after the last step the sums leave the tiles.
  void advance_values() {
    const Kernels& run = kernels_for(*weighs_, amx_.value_groups - column_);
    float* sums = weighs_->sums + column_ * kLanes;
    if (at_ < weighs_->end) {
      if (at_ == weighs_->first) run.load(sums, sums_stride_);
      const ValueStep& step = weighs_->steps[at_];
      const std::byte* values = step.values + column_ * 64;
      run.multiply(reinterpret_cast<const std::byte*>(weighs_->weights + at_ * kStepTokens), kTileTokens * 2,
                   kTileOfRows * kTileTokens * 2, values, values + 64, step.stride);
      ++at_;
      return;
    }
    run.store(sums, sums_stride_);
    column_ += 2;
    at_ = weighs_->first;
    if (column_ >= amx_.value_groups) weighs_ = nullptr;
  }
  // Two groups of 16 keys by one step of 32 dimensions.
  void advance_scores() {
    constexpr int64_t kBytes = kTileOfRows * kTileRowBytes;
    const int64_t columns = scores_->to - column_;
    const Kernels& run = kernels_for(*scores_, columns);
    if (at_ < amx_.key_steps) {
      if (at_ == 0) run.zero();
      const std::byte* second = columns > 1 ? tile_.keys[column_ + 1] + at_ * kBytes : nullptr;
      run.multiply(scores_->queries + at_ * kBytes, kTileRowBytes, amx_.key_steps * kBytes,
                   tile_.keys[column_] + at_ * kBytes, second, kTileRowBytes);
      ++at_;
      return;
    }
    run.store(scores_->scores + column_ * kGroup, kTileTokens);
    column_ += 2;
    at_ = 0;
    if (column_ < scores_->to) return;
    scores_ = nullptr;
    if (weighs_ != nullptr) column_ = 0, at_ = weighs_->first;
  }

  const AmxRows& amx_;
  const AmxTile& tile_;
  const int64_t sums_stride_;
  const AmxBlock *weighs_ = nullptr, *scores_ = nullptr;
  int64_t column_ = 0, at_ = 0;  // the first of two groups, and the next step
};

// --- Softmax ------------------------------------------------------------------------------------------------------

// The largest lane of each of 16 vectors.
inline __m512 largest_of_each(const __m512* x) {
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
void soften_block(const AttendRows& rows, const AmxBlock& block, const float* const* scales, int64_t block_size,
                  Products& products, int64_t pace, int64_t query_bytes) {
  for (int64_t r = 0; r < block.count; ++r) {
    const Weights w = {_mm512_set1_ps(rows.scale), _mm512_set1_ps(-rows.tile.highest[block.row + r])};
    float* totals = rows.tile.totals + (block.row + r) * kLanes;
    __m512 total = _mm512_loadu_ps(totals);
    for (int64_t i = block.first; i < block.end; ++i) {
      const float *factors0 = nullptr, *factors1 = nullptr;
      if constexpr (kScaled) factors0 = scales[2 * i] + block_size, factors1 = scales[2 * i + 1] + block_size;
      const int64_t at = r * kTileTokens + i * kStepTokens;
      const __m512i pair = soften_pair<kMasked, kScaled>(block.scores + at, w, factors0, factors1, total);
      _mm512_storeu_si512(block.weights + at, pair);
    }
    _mm512_storeu_ps(totals, total);
    for (int64_t i = 0; i < query_bytes; i += 64) prefetch_l1(block.queries + (2 * block.count + r) * query_bytes + i);
    if (r % 2 == 1) {
      for (int64_t i = 0; i < pace; ++i) products.advance();
    }
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

inline AmxBlock make_block(const AttendRows& rows, const AmxRows& amx, int64_t row, int64_t count,
                           const AmxTile& tile) {
  const int64_t last = row + count - 1, parity = row / amx.block_rows % 2;
  AmxBlock block;
  block.row = row;
  block.count = count;
  block.low = clamp(rows.lows[row] - tile.begin, 0, kTileTokens);
  block.high = clamp(rows.highs[last] - tile.begin, 0, kTileTokens);
  block.from = block.low / kGroup, block.to = (block.high + kGroup - 1) / kGroup;
  block.first = block.low / kStepTokens, block.end = (block.high + kStepTokens - 1) / kStepTokens;
  block.masked = rows.lows[last] - tile.begin > block.first * kStepTokens ||
                 rows.highs[row] - tile.begin < block.end * kStepTokens;
  block.queries = amx.queries + row * amx.key_steps * kTileRowBytes;
  block.scores = amx.scores[parity];
  block.weights = amx.weights[parity];
  block.sums = rows.tile.sums + row * rows.stride;
  return block;
}

// Values that no row of the block sees may be NaN, and zero times them would be, too: such steps are copied.
inline void find_steps(const KvLayer& kv, const AmxRows& amx, const AmxTile& tile, AmxBlock* block) {
  std::byte* edge = amx.edges;
  for (int64_t i = block->first; i < block->end; ++i) {
    block->steps[i] = tile.steps[i];
    if (block->low <= i * kStepTokens && block->high >= (i + 1) * kStepTokens) continue;
    copy_step(kv, tile.places, i, block->low, block->high, amx, edge);
    block->steps[i] = {edge, amx.value_groups * 64};
    edge += kStepTokens * amx.value_groups * 32;
  }
}

// A block's scores to weights, while `products` go on.
inline void soften(const AttendOp& op, const AttendRows& rows, const AmxTile& tile, const AmxBlock& block,
                   Products& products, int64_t units) {
  const int64_t slots = block.count * 3 / 4, pace = (units + slots - 1) / slots;
  const bool scaled = op.kv.format == KvFormat::i8;
  __m512 tops[kBlockRows];
  for (int64_t r = 0; r < block.count; ++r) {
    float* scores = block.scores + r * kTileTokens;
    if (block.masked || scaled || rows.cap_scale != 0.0f) {
      const int64_t low = rows.lows[block.row + r] - tile.begin, high = rows.highs[block.row + r] - tile.begin;
      for (int64_t g = 2 * block.first; g < 2 * block.end; ++g) {
        const bool has = g >= block.from && g < block.to;
        F32x16 x = has ? load(scores + g * kGroup) : zero();
        if (scaled && has) x = x * load(tile.places.scales[g]);
        if (rows.cap_scale != 0.0f) x = tanh(x * broadcast(rows.cap_scale));
        store(scores + g * kGroup, block.masked ? masked(x, g * kGroup, low, high) : x);
      }
    }
    tops[r] = _mm512_set1_ps(-__builtin_inff());
    for (int64_t i = block.first; i < block.end; ++i) {
      const float* two = scores + i * kStepTokens;
      tops[r] = _mm512_max_ps(tops[r], _mm512_max_ps(_mm512_loadu_ps(two), _mm512_loadu_ps(two + kLanes)));
    }
    // The block's sums are needed next.
    for (int64_t i = 0; i < rows.stride; i += kLanes) prefetch_l1(block.sums + r * rows.stride + i);
    if (r % 4 == 3) {
      for (int64_t i = 0; i < pace; ++i) products.advance();
    }
  }
  for (int64_t r = 0; r < block.count; r += kLanes) {
    raise_references(rows, block.row + r, _mm512_mul_ps(largest_of_each(tops + r), _mm512_set1_ps(rows.scale)));
  }
  const auto soften_rows = scaled ? (block.masked ? soften_block<true, true> : soften_block<false, true>)
                                  : (block.masked ? soften_block<true, false> : soften_block<false, false>);
  soften_rows(rows, block, tile.places.scales, op.kv.block_size, products, pace, products.query_bytes());
  products.finish();
}

// All blocks of an item by one tile: while a block's scores become weights, the scores of the next one and the weighted
// values of the one before are on their way.
inline void attend_blocks(const AttendOp& op, const AttendRows& rows, const AmxRows& amx, int64_t num_rows,
                          const AmxTile& tile) {
  Products products(amx, tile, rows.stride);
  AmxBlock blocks[3];
  AmxBlock *before = nullptr, *block = nullptr;
  int64_t made = 0;
  for (int64_t row = 0; row < num_rows + amx.block_rows; row += amx.block_rows) {
    AmxBlock* next = nullptr;
    if (row < num_rows) {
      next = &blocks[made % 3];
      const int64_t count = num_rows - row < amx.block_rows ? num_rows - row : amx.block_rows;
      *next = make_block(rows, amx, row, count, tile);
      if (!next->sees_any()) continue;
      ++made;
    }
    const int64_t units = products.start(next, before);
    if (block != nullptr) {
      soften(op, rows, tile, *block, products, units);
      find_steps(op.kv, amx, tile, block);
    } else {
      products.finish();
    }
    before = block;
    block = next;
  }
  products.start(nullptr, before);
  products.finish();
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
    const int64_t num_rows = (rows.count + kTileOfRows - 1) / kTileOfRows * kTileOfRows;
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
      attend_blocks(op_, rows, amx_, num_rows, tile);
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
