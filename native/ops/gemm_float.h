// Products of fp32 rows with fp32 and fp16 weights, and of bf16 rows with bf16 weights: one kernel for all three.
//
// A block of R rows x C tiles keeps its sums in registers while it goes through the inputs: each weight is loaded once
// for R rows, each activation once for C tiles. Long rows are cut, the sums resting in `out` between the cuts, so that
// the weights of one cut stay in the L1 cache for the next rows. Neither changes the order of any sum (gemm.h).
#pragma once
#include "ops/float_formats.h"
#include "ops/gemm_amx.h"
#include "ops/kv_ahead.h"

namespace quire {
namespace {

// R * C sums beside C weights and an activation must fit the registers.
#if defined(__AVX512F__)
constexpr int kFloatRows = 8, kFloatRowsOfPair = 8;
constexpr bool kPairsOfTiles = true;
#elif defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int kFloatRows = 6, kFloatRowsOfPair = 2;
constexpr bool kPairsOfTiles = false;
#else
constexpr int kFloatRows = 1, kFloatRowsOfPair = 1;
constexpr bool kPairsOfTiles = false;
#endif
constexpr int64_t kTilesOfCut = 2;
constexpr int64_t kWideningRows = 4 * kFloatRows + 1;  // from which weights are widened for all rows, not in the kernel
constexpr int64_t kFloatPrefetchBytes = 4096;          // ahead in a tile's stream; with 1024 one row is 10 % slower
// Of several groups the products wait for no memory, and keys and values are fetched too: 32 rows of bf16 take 6 % less
// time with the attention after them. Of two they wait for the weights.
constexpr int64_t kGroupsToFetchKv = 3, kStepsOfKvLine = 4;

// Inputs to add to the sums of some rows: `steps` steps of C tiles, whose weights start at w + c * stride.
struct FloatCut {
  const std::byte* w;
  int64_t stride, steps;
  bool resumes;           // `out` holds the sums so far
  const std::byte* next;  // the cut after this one; null if nothing is to be fetched
  KvFetch::Bytes kv;
};

// What is fetched: nothing, the weights just ahead, or a share of the next cut's. One group of rows is as fast as
// memory; of several, each fetches a share, since the first would wait for all of it and the others leave memory idle.
enum class Fetch { nothing, near, share };

template <typename Format, int R, int C, Fetch kFetch>
void float_block(const FloatCut& cut, int64_t group, int64_t num_groups, const std::byte* const* x, float* out,
                 int64_t out_stride) {
  F32x16 y[R][C];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = cut.resumes ? load(out + r * out_stride + c * kTile) : zero();
  }
  const std::byte *w = cut.w, *next = nullptr;
  const std::byte* kv = cut.kv.begin;
  int64_t every = 1, wait = 1;  // steps for each line
  if constexpr (kFetch == Fetch::share) {
    next = cut.next + cut.steps * Format::kWeightBytes / num_groups * group;
    every = wait = num_groups * 64 / Format::kWeightBytes;
  }
  for (int64_t i = 0; i < cut.steps; ++i, w += Format::kWeightBytes) {
    if (kFetch == Fetch::share && --wait == 0) {
      QUIRE_UNROLL for (int c = 0; c < C; ++c) prefetch(next + c * cut.stride);
      next += 64;
      wait = every;
    }
    if (kFetch == Fetch::share && i % kStepsOfKvLine == 0 && kv < cut.kv.end) {
      prefetch(kv);
      kv += 64;
    }
    decltype(Format::weights(w)) weights[C];
    QUIRE_UNROLL for (int c = 0; c < C; ++c) {
      weights[c] = Format::weights(w + c * cut.stride);
      if (kFetch == Fetch::near) prefetch_l1(w + c * cut.stride + kFloatPrefetchBytes);
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r) {
      const auto value = Format::activation(x[r] + i * Format::kRowBytes);
      QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = Format::add(weights[c], value, y[r][c]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL for (int c = 0; c < C; ++c) store(out + r * out_stride + c * kTile, y[r][c]);
  }
}

// The kernel of `rows` rows, 1 … R.
template <typename Format, int C, int R>
void float_rows(int64_t rows, const FloatCut& cut, int64_t group, int64_t num_groups, const std::byte* const* x,
                float* out, int64_t out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return float_rows<Format, C, R - 1>(rows, cut, group, num_groups, x, out, out_stride);
  }
  if (cut.next == nullptr) return float_block<Format, R, C, Fetch::nothing>(cut, group, num_groups, x, out, out_stride);
  return num_groups > 1 ? float_block<Format, R, C, Fetch::share>(cut, group, num_groups, x, out, out_stride)
                        : float_block<Format, R, C, Fetch::near>(cut, group, num_groups, x, out, out_stride);
}

// One cut, inputs from step `begin` on, of num_tiles tiles (a multiple of C) times all rows. The weights are of type
// `Format`, which is F32Weights when they were widened; the activations are those of `Source`.
template <typename Source, typename Format, int C>
void float_cut(const FloatCut& cut, int64_t num_tiles, const Rows& x, int64_t first, int64_t num_rows, int64_t begin,
               int64_t steps, KvFetch& fetch, float* out, int64_t out_stride) {
  constexpr int64_t kMost = C == 1 ? kFloatRows : kFloatRowsOfPair, kWidest = Source::kDepth * 2;
  alignas(64) float wide[kMost * kWidest];
  const std::byte* values[kMost];
  const int64_t num_groups = (num_rows + kMost - 1) / kMost;
  for (int64_t group = 0, r = 0; group < num_groups; ++group) {
    const int64_t rows = (num_rows - r + num_groups - group - 1) / (num_groups - group);
    for (int64_t k = 0; k < rows; ++k) {
      values[k] = Source::Activations::read(row<std::byte>(x, first + r + k), begin, steps, wide + k * kWidest);
    }
    for (int64_t c = 0; c < num_tiles; c += C) {
      FloatCut tiles = cut;
      tiles.w += c * cut.stride;
      if (cut.next != nullptr) tiles.next += c * cut.stride;
      if (cut.next != nullptr && num_groups >= kGroupsToFetchKv) tiles.kv = fetch.take(steps / kStepsOfKvLine * 64);
      float_rows<Format, C, kMost>(rows, tiles, group, num_groups, values, out + r * out_stride + c * kTile,
                                   out_stride);
    }
    r += rows;
  }
}

// `from` widened, at most kTilesOfCut tiles, to `wide`.
template <typename Format>
FloatCut widened(const FloatCut& from, int64_t num_tiles, float* wide) {
  constexpr int64_t kTileFloats = Format::kDepth * Format::kWide * kTile;
  for (int64_t c = 0; c < num_tiles; ++c) {
    for (int64_t i = 0; i < from.steps; ++i) {
      const std::byte* w = from.w + c * from.stride + i * Format::kWeightBytes;
      prefetch_l1(w + kFloatPrefetchBytes);
      Format::widen(w, wide + c * kTileFloats + i * Format::kWide * kTile);
    }
  }
  return {
      reinterpret_cast<const std::byte*>(wide), kTileFloats * 4, from.steps * Format::kWide, from.resumes, nullptr, {}};
}

// At most kTilesOfCut tiles times all rows.
template <typename Format, int C>
void float_tiles(const std::byte* w, int64_t stride, int64_t num_tiles, const Rows& x, int64_t first, int64_t num_rows,
                 int64_t num_steps, KvFetch& fetch, float* out, int64_t out_stride) {
  const int64_t num_cuts = (num_steps + Format::kDepth - 1) / Format::kDepth,
                most = (num_steps + num_cuts - 1) / num_cuts;
  for (int64_t begin = 0; begin < num_steps; begin += most) {
    const int64_t left = num_steps - begin, steps = left < most ? left : most;
    const std::byte* next = w + (left > steps ? (begin + steps) * Format::kWeightBytes : num_tiles * stride);
    const FloatCut cut{w + begin * Format::kWeightBytes, stride, steps, begin > 0, next, {}};
    if constexpr (Format::kWide > 0) {
      if (num_rows >= kWideningRows) {
        alignas(64) float wide[kTilesOfCut * Format::kDepth * Format::kWide * kTile];
        const FloatCut wider = widened<Format>(cut, num_tiles, wide);
        float_cut<Format, F32Weights, C>(wider, num_tiles, x, first, num_rows, begin, steps, fetch, out, out_stride);
        continue;
      }
    }
    float_cut<Format, Format, C>(cut, num_tiles, x, first, num_rows, begin, steps, fetch, out, out_stride);
  }
}

template <typename Format>
void float_format(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile, int64_t num_tiles,
                  KvFetch& fetch, float* out, int64_t out_stride) {
  const int64_t stride = tile_bytes(weight.format, weight.num_inputs);
  const int64_t num_steps = (weight.num_inputs + Format::kInputs - 1) / Format::kInputs;
  const std::byte* w = weight.data + tile * stride;
  for (int64_t c = 0; c < num_tiles; c += kTilesOfCut) {
    const int64_t tiles = num_tiles - c < kTilesOfCut ? num_tiles - c : kTilesOfCut;
    const bool pairs = tiles == 2 && (kPairsOfTiles || num_rows <= kFloatRowsOfPair);
    const auto multiply = pairs ? float_tiles<Format, 2> : float_tiles<Format, 1>;
    multiply(w + c * stride, stride, tiles, x, first, num_rows, num_steps, fetch, out + c * kTile, out_stride);
  }
}

// y of rows first … first + num_rows - 1 and of num_tiles tiles from `tile` on, to out[row][16 * tiles].
inline void multiply_float(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                           int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  switch (weight.format) {
    case WeightFormat::f32:
      return float_format<F32Weights>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
    case WeightFormat::f16:
      return float_format<F16Weights>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
    default:
#if defined(QUIRE_TILES)
      return multiply_bf16_tiles(weight, x, first, num_rows, tile, num_tiles, out, out_stride);
#else
      return float_format<Bf16Weights>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
#endif
  }
}

}  // namespace
}  // namespace quire
