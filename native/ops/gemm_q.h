// Products of int8 rows with 4- and 8-bit weights.
//
// The kernel keeps kRowsAtOnce rows by kTilesAtOnce tiles of sums in registers, so that a block's weights are unpacked
// and its scales converted once for all of these rows. Per block of 32 inputs, row and tile, AVX-512 needs eight
// VPDPBUSD, a multiplication and one or two fused multiply-adds, all on the same two units: 11 cycles for 512 products
// on Zen 4, of which 98 % are reached (benchmarks/kernels/gemm_quantised.py).
#pragma once
#include "isa/dots.h"
#include "isa/simd.h"
#include "ops/kv_ahead.h"
#include "plan/types.h"

namespace quire {
namespace {

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 6, kTilesAtOnce = 2;  // 12 integer and 12 fp32 sums in 32 registers
#elif defined(__AVX2__)
constexpr int kRowsAtOnce = 4, kTilesAtOnce = 1;
#else
constexpr int kRowsAtOnce = 1, kTilesAtOnce = 1;
#endif

template <WeightFormat kFormat>
struct Quantised {
  using Dots = NibbleDots;
  static constexpr int kBytes = 256;  // of a block
};
template <>
struct Quantised<WeightFormat::q8> {
  using Dots = ByteDots;
  static constexpr int kBytes = 512;
};

struct QTile {
  const uint8_t* u;
  const uint16_t* d;
  const uint16_t* m;  // of q4m
};

template <WeightFormat kFormat>
inline QTile q_tile(const Weight& weight, int64_t tile) {
  const int64_t blocks = weight.num_inputs / kBlock;
  const std::byte* data = weight.data + tile * tile_bytes(kFormat, weight.num_inputs);
  const auto* scales = reinterpret_cast<const uint16_t*>(data + blocks * Quantised<kFormat>::kBytes);
  return {reinterpret_cast<const uint8_t*>(data), scales, scales + blocks * kTile};
}

// The exact integer sum of products of one block, about the weights' centre.
template <WeightFormat kFormat>
inline I32x16 block_product(typename Quantised<kFormat>::Dots::Sums sums, const ActBlock& x) {
  if constexpr (kFormat == WeightFormat::q8) {
    return ByteDots::total(sums, x.sum);
  } else if constexpr (kFormat == WeightFormat::q4) {
    return NibbleDots::total(sums) - shift_left<3>(broadcast(x.sum));
  } else {
    return NibbleDots::total(sums);
  }
}

// With half of that attention waits longer, with twice as much products do.
constexpr int64_t kKvBytesOfBlock = 256;

// What to fetch during a block: lines of weights, then keys and values.
struct Ahead {
  const std::byte* weights;
  int num_lines;
  KvFetch::Bytes kv;
};

// y of kRows rows from x on (stride x_stride bytes) and of kTiles tiles, to out[row][16 * kTiles].
template <WeightFormat kFormat, int kRows, int kTiles>
void multiply_tiles(const QTile* tiles, const std::byte* x, int64_t x_stride, int64_t blocks, Ahead ahead, float* out,
                    int64_t out_stride) {
  using Dots = typename Quantised<kFormat>::Dots;
  constexpr int kBytes = Quantised<kFormat>::kBytes;
  F32x16 y[kRows][kTiles];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) { QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) y[r][c] = zero(); }
  for (int64_t b = 0; b < blocks; ++b, x += sizeof(ActBlock)) {
    for (int i = 0; i < ahead.num_lines; ++i, ahead.weights += 64) prefetch_l1(ahead.weights);
    if (ahead.kv.begin < ahead.kv.end) {
      QUIRE_UNROLL for (int i = 0; i < kKvBytesOfBlock; i += 64) prefetch(ahead.kv.begin + i);
      ahead.kv.begin += kKvBytesOfBlock;
    }
    typename Dots::Sums sums[kRows][kTiles];
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) sums[r][c] = Dots::zero();
    }
    QUIRE_UNROLL for (int i = 0; i < kBlock; i += Dots::kInputs) {
      typename Dots::Weights w[kTiles];
      QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) w[c] = Dots::load(tiles[c].u + b * kBytes + i / Dots::kInputs * 64);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        const auto& acts = *reinterpret_cast<const ActBlock*>(x + r * x_stride);
        QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) sums[r][c] = Dots::add(sums[r][c], w[c], acts.q + i);
      }
    }
    QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) {
      const F32x16 d = widen_f16(tiles[c].d + b * kTile);
      F32x16 m;
      if constexpr (kFormat == WeightFormat::q4m) m = widen_f16(tiles[c].m + b * kTile);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        const auto& acts = *reinterpret_cast<const ActBlock*>(x + r * x_stride);
        const F32x16 p = to_float(block_product<kFormat>(sums[r][c], acts));
        y[r][c] = fma(p, d * broadcast(acts.scale), y[r][c]);
        if constexpr (kFormat == WeightFormat::q4m) y[r][c] = fma(m, broadcast(acts.scaled_sum), y[r][c]);
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) store(out + r * out_stride + c * kTile, y[r][c]);
  }
}

using MultiplyTiles = void (*)(const QTile*, const std::byte*, int64_t, int64_t, Ahead, float*, int64_t);

// The kernel for 1 … kRowsAtOnce rows.
template <WeightFormat kFormat, int kTiles, int kRows = kRowsAtOnce>
inline MultiplyTiles multiply_tiles_for(int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_tiles_for<kFormat, kTiles, kRows - 1>(num_rows);
  }
  return multiply_tiles<kFormat, kRows, kTiles>;
}

// Rows are dealt to as few groups as hold them, evenly: a last group of one row would be half as fast.
template <WeightFormat kFormat, int kTiles>
void multiply_q_by(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                   int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(kFormat, weight.num_inputs);
  const int64_t groups = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  // All groups fetch the next tiles' weights: a first one that fetched them alone would wait for memory, and the others
  // leave it idle.
  const auto num_lines = static_cast<int>((kTiles * bytes / 64 + blocks * groups - 1) / (blocks * groups));
  for (int64_t c = 0; c < num_tiles; c += kTiles) {
    QTile tiles[kTiles];
    for (int i = 0; i < kTiles; ++i) {
      // A lone last tile is taken twice.
      tiles[i] = q_tile<kFormat>(weight, tile + (c + i < num_tiles ? c + i : c));
    }
    const std::byte* next = weight.data + (tile + c + kTiles) * bytes;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = num_rows * g / groups, end = num_rows * (g + 1) / groups;
      const Ahead ahead = {next + g * blocks * num_lines * 64, num_lines,
                           g == 0 ? KvFetch::Bytes{} : fetch.take(blocks * kKvBytesOfBlock)};
      multiply_tiles_for<kFormat, kTiles>(end - begin)(tiles, x.data + (first + begin) * x.stride_bytes, x.stride_bytes,
                                                       blocks, ahead, out + begin * out_stride + c * kTile, out_stride);
    }
  }
}

// Few rows wait for memory, which delivers one stream of weights faster than several.
template <WeightFormat kFormat>
void multiply_q_as(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                   int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const auto by = num_rows > kRowsAtOnce ? multiply_q_by<kFormat, kTilesAtOnce> : multiply_q_by<kFormat, 1>;
  by(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
}

// See gemm.h: the order of operations. out has room for an even number of tiles.
inline void multiply_q(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  switch (weight.format) {
    case WeightFormat::q4:
      return multiply_q_as<WeightFormat::q4>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
    case WeightFormat::q4m:
      return multiply_q_as<WeightFormat::q4m>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
    default:
      return multiply_q_as<WeightFormat::q8>(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
  }
}

}  // namespace
}  // namespace quire
