// Products on AMX's tile registers (isa/tiles.h).
//
// int8 rows: a tile instruction gives the exact sums of one block of 32 inputs for 8 or 16 rows x 16 outputs; scaling
// them takes longer than that, in the same order as gemm_q.h: the bits are the same. What is left of the rows, if fewer
// than 8, is left to gemm_q.h.
// bf16 rows: the one product whose bits depend on the instruction set. Per 32 inputs, the last few padded with zeros:
// y = y + (even + odd), of two chains of fused multiply-adds of which each starts at 0 (isa/tiles.h).
#pragma once
#include "ops/gemm_q.h"
#include "plan/types.h"

#if defined(QUIRE_TILES)
#include "isa/simd.h"
#include "isa/tiles.h"

namespace quire {
namespace {

constexpr int64_t kFewestTileRows = 8;  // of int8; VNNI is as fast up to there

// The tile registers of this thread for as long as it multiplies with such a weight: configuring takes 45 ns, and
// context switches are dearer while they are in use. At most num_rows rows at once.
class TileSession {
 public:
  TileSession(WeightFormat format, int64_t num_rows)
      : used_(format == WeightFormat::bf16 || (wanted_rows(format) == RowType::q8 && num_rows >= kFewestTileRows)) {
    // Numbers as in q_rows and bf16_block.
    constexpr TileShape kBytes[] = {{16, 64}, {16, 64}, {16, 32}, {8, 64}, {8, 64}, {8, 32}, {8, 64}, {8, 64}};
    constexpr TileShape kHalves[] = {{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}};
    if (used_) configure_tiles(format == WeightFormat::bf16 ? kHalves : kBytes);
  }
  ~TileSession() {
    if (used_) release_tiles();
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  bool used_;
};

// --- int8 ---------------------------------------------------------------------------------------------------------

constexpr int64_t kCutBlocks = 16;

// Some blocks of one tile of weights: signed bytes, and scales as fp32.
struct UnpackedCut {
  alignas(64) int8_t w[kCutBlocks][8][64];
  alignas(64) float d[kCutBlocks][kTile];
  alignas(64) float m[kCutBlocks][kTile];
};

inline void unpack_cut(const Weight& weight, int64_t tile, int64_t begin, int64_t count, UnpackedCut* cut) {
  constexpr int64_t kAhead = 2048;
  const int64_t blocks = weight.num_inputs / kBlock, bytes = weight.format == WeightFormat::q8 ? 512 : 256;
  const std::byte* data = weight.data + tile * tile_bytes(weight.format, weight.num_inputs);
  const auto* u = reinterpret_cast<const uint8_t*>(data) + begin * bytes;
  const auto* d = reinterpret_cast<const uint16_t*>(data + blocks * bytes) + begin * kTile;
  const int8_t centre = weight.format == WeightFormat::q4 ? 8 : 0;
  for (int64_t b = 0; b < count; ++b, u += bytes, d += kTile) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(u + kAhead + i);
    auto* w = cut->w[b][0];
    if (weight.format == WeightFormat::q8) {
      for (int i = 0; i < 512; ++i) w[i] = static_cast<int8_t>(u[i] ^ 0x80);  // u - 128
    } else {
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 64; ++i) {
          w[128 * j + i] = static_cast<int8_t>((u[64 * j + i] & 15) - centre);
          w[128 * j + 64 + i] = static_cast<int8_t>((u[64 * j + i] >> 4) - centre);
        }
      }
    }
    store(cut->d[b], widen_f16(d));
    if (weight.format == WeightFormat::q4m) store(cut->m[b], widen_f16(d + blocks * kTile));
  }
}

// The integer sums of one block of kRows rows.
template <int kSums, int kActs, int kWeights>
inline void q_block(const std::byte* x, int64_t stride, const int8_t* w, int32_t* sums) {
  tile_load<kActs>(x, stride);
  tile_load<kWeights>(w, 64);
  tile_zero<kSums>();
  tile_dot_s8<kSums, kActs, kWeights>();
  tile_store<kSums>(sums, 64);
}

template <bool kMinima, int kRows>
inline void scale_block(const int32_t (*sums)[kTile], const std::byte* x, int64_t stride, F32x16 d, F32x16 m,
                        F32x16 (&y)[kRows]) {
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    const auto* acts = reinterpret_cast<const ActBlock*>(x + r * stride);
    y[r] = fma(to_float(load(sums[r])), d * broadcast(acts->scale), y[r]);
    if (kMinima) y[r] = fma(m, broadcast(acts->scaled_sum), y[r]);
  }
}

// kRows rows x one tile, some blocks from x on. The sums of the next block are on their way while one is scaled.
template <bool kMinima, int kRows>
void q_rows(const UnpackedCut& cut, int64_t count, bool resumes, const std::byte* x, int64_t stride, float* out,
            int64_t out_stride) {
  constexpr int kFirst = kRows == 16 ? 0 : 3, kActs = kFirst + 2;
  alignas(64) int32_t sums[2][kRows][kTile];
  F32x16 y[kRows];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) y[r] = resumes ? load(out + r * out_stride) : zero();
  q_block<kFirst, kActs, 6>(x, stride, cut.w[0][0], sums[0][0]);
  for (int64_t b = 0; b < count; b += 2, x += 2 * sizeof(ActBlock)) {
    const std::byte *second = x + sizeof(ActBlock), *third = second + sizeof(ActBlock);
    if (b + 1 < count) q_block<kFirst + 1, kActs, 7>(second, stride, cut.w[b + 1][0], sums[1][0]);
    scale_block<kMinima>(sums[0], x, stride, load(cut.d[b]), kMinima ? load(cut.m[b]) : zero(), y);
    if (b + 2 < count) q_block<kFirst, kActs, 6>(third, stride, cut.w[b + 2][0], sums[0][0]);
    if (b + 1 < count) {
      scale_block<kMinima>(sums[1], second, stride, load(cut.d[b + 1]), kMinima ? load(cut.m[b + 1]) : zero(), y);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) store(out + r * out_stride, y[r]);
}

template <bool kMinima>
void q_group(const UnpackedCut& cut, int64_t count, bool resumes, const std::byte* x, int64_t stride, int64_t num_rows,
             float* out, int64_t out_stride) {
  if (num_rows == 16) return q_rows<kMinima, 16>(cut, count, resumes, x, stride, out, out_stride);
  if (num_rows == 8) return q_rows<kMinima, 8>(cut, count, resumes, x, stride, out, out_stride);
  // 9 … 15 rows: the tile instructions would read 16.
  ActBlock rows[16][kCutBlocks];
  alignas(64) float values[16][kTile] = {};
  memset(rows[num_rows], 0, static_cast<size_t>(16 - num_rows) * sizeof rows[0]);
  for (int64_t r = 0; r < num_rows; ++r) {
    memcpy(rows[r], x + r * stride, static_cast<size_t>(count) * sizeof(ActBlock));
    if (resumes) memcpy(values[r], out + r * out_stride, sizeof values[r]);
  }
  q_rows<kMinima, 16>(cut, count, resumes, reinterpret_cast<const std::byte*>(rows), sizeof rows[0], values[0], kTile);
  for (int64_t r = 0; r < num_rows; ++r) memcpy(out + r * out_stride, values[r], sizeof values[r]);
}

inline void multiply_q_tiles(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                             int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const int64_t blocks = weight.num_inputs / kBlock, few = num_rows % 16 < kFewestTileRows ? num_rows % 16 : 0;
  if (few > 0) {
    const int64_t rest = num_rows - few;
    multiply_q(weight, x, first + rest, few, tile, num_tiles, fetch, out + rest * out_stride, out_stride);
  }
  for (int64_t c = 0; c < num_tiles && num_rows > few; ++c) {
    for (int64_t begin = 0; begin < blocks; begin += kCutBlocks) {
      const int64_t count = blocks - begin < kCutBlocks ? blocks - begin : kCutBlocks;
      UnpackedCut cut;
      unpack_cut(weight, tile + c, begin, count, &cut);
      for (int64_t r = 0; r < num_rows - few; r += 16) {
        const int64_t rows = num_rows - few - r < 16 ? num_rows - few - r : 16;
        const auto* acts = row<std::byte>(x, first + r) + begin * static_cast<int64_t>(sizeof(ActBlock));
        const auto group = weight.format == WeightFormat::q4m ? q_group<true> : q_group<false>;
        group(cut, count, begin > 0, acts, x.stride_bytes, rows, out + r * out_stride + c * kTile, out_stride);
      }
    }
  }
}

// --- bf16 ---------------------------------------------------------------------------------------------------------

// Sixteen rows of activations and their results, both `stride` bytes apart.
struct Bf16Group {
  const std::byte* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
};

constexpr int64_t kStepBytes = 64;  // 32 inputs of a row; of a tile of weights 16 times that

// The last pairs of 16 rows, or of a tile's 16 rows of pairs, with zeros after them.
struct alignas(64) LastStep {
  std::byte data[16][kStepBytes] = {};
  LastStep(const std::byte* from, int64_t stride, int64_t num_rows, int64_t bytes) {
    for (int64_t r = 0; r < num_rows; ++r) memcpy(data[r], from + r * stride, static_cast<size_t>(bytes));
  }
};

template <int kGroups, int kTiles>
inline void add_step(const std::byte* x0, int64_t stride0, const std::byte* x1, int64_t stride1, const std::byte* w0,
                     const std::byte* w1) {
  tile_load<4>(x0, stride0);
  tile_load<6>(w0, kStepBytes);
  tile_dot_bf16<0, 4, 6>();
  if constexpr (kTiles == 2) {
    tile_load<7>(w1, kStepBytes);
    tile_dot_bf16<1, 4, 7>();
  }
  if constexpr (kGroups == 2) {
    tile_load<5>(x1, stride1);
    tile_dot_bf16<2, 5, 6>();
    if constexpr (kTiles == 2) tile_dot_bf16<3, 5, 7>();
  }
}

template <int kT>
inline void load_sums(bool resumes, const float* from, int64_t stride) {
  if (resumes) {
    tile_load<kT>(from, stride * 4);
  } else {
    tile_zero<kT>();
  }
}

// kGroups x 16 rows by kTiles x 16 outputs, some inputs, whose weights start at w.
template <int kGroups, int kTiles>
void bf16_block(const Bf16Group* groups, const std::byte* w, int64_t tile_stride, int64_t num_pairs, bool resumes,
                bool prefetch) {
  constexpr int64_t kAhead = 4096;
  const Bf16Group &a = groups[0], &b = groups[kGroups - 1];
  load_sums<0>(resumes, a.out, a.out_stride);
  if (kTiles == 2) load_sums<1>(resumes, a.out + kTile, a.out_stride);
  if (kGroups == 2) load_sums<2>(resumes, b.out, b.out_stride);
  if (kGroups == 2 && kTiles == 2) load_sums<3>(resumes, b.out + kTile, b.out_stride);
  const int64_t num_steps = num_pairs / 16, left = num_pairs % 16;
  for (int64_t i = 0; i < num_steps; ++i) {
    const std::byte* w0 = w + i * 16 * kStepBytes;
    for (int64_t line = 0; prefetch && line < 16 * kTiles; ++line) {
      __builtin_prefetch(w0 + line / 16 * tile_stride + kAhead + line % 16 * 64);
    }
    add_step<kGroups, kTiles>(a.x + i * kStepBytes, a.x_stride, b.x + i * kStepBytes, b.x_stride, w0,
                              w0 + tile_stride * (kTiles - 1));
  }
  if (left > 0) {
    const int64_t at = num_steps * kStepBytes;
    const std::byte* w0 = w + at * 16;
    const LastStep x0(a.x + at, a.x_stride, 16, left * 4), x1(b.x + at, b.x_stride, 16, left * 4);
    const LastStep last0(w0, kStepBytes, left, kStepBytes);
    const LastStep last1(w0 + tile_stride * (kTiles - 1), kStepBytes, left, kStepBytes);
    add_step<kGroups, kTiles>(x0.data[0], kStepBytes, x1.data[0], kStepBytes, last0.data[0], last1.data[0]);
  }
  tile_store<0>(a.out, a.out_stride * 4);
  if (kTiles == 2) tile_store<1>(a.out + kTile, a.out_stride * 4);
  if (kGroups == 2) tile_store<2>(b.out, b.out_stride * 4);
  if (kGroups == 2 && kTiles == 2) tile_store<3>(b.out + kTile, b.out_stride * 4);
}

inline void bf16_groups(const Bf16Group* groups, int64_t num_groups, const std::byte* w, int64_t tile_stride,
                        int64_t num_tiles, int64_t num_pairs, bool resumes, bool prefetch) {
  const auto block = num_groups == 2 ? (num_tiles == 2 ? bf16_block<2, 2> : bf16_block<2, 1>)
                                     : (num_tiles == 2 ? bf16_block<1, 2> : bf16_block<1, 1>);
  block(groups, w, tile_stride, num_pairs, resumes, prefetch);
}

// Fewer than 16 rows: the tile instructions would read 16, so a cut of them is copied and padded with zeros.
inline void bf16_few_rows(const Bf16Group& rows, int64_t num_rows, const std::byte* w, int64_t tile_stride,
                          int64_t num_tiles, int64_t num_pairs) {
  constexpr int64_t kPairs = 256;
  alignas(64) std::byte padded[16][kPairs * 4];
  alignas(64) float values[16][2 * kTile];
  memset(padded[num_rows], 0, static_cast<size_t>(16 - num_rows) * sizeof padded[0]);
  const Bf16Group group{padded[0], sizeof padded[0], values[0], 2 * kTile};
  for (int64_t begin = 0; begin < num_pairs; begin += kPairs) {
    const int64_t pairs = num_pairs - begin < kPairs ? num_pairs - begin : kPairs;
    for (int64_t r = 0; r < num_rows; ++r) {
      memcpy(padded[r], rows.x + r * rows.x_stride + begin * 4, static_cast<size_t>(pairs) * 4);
    }
    bf16_groups(&group, 1, w + begin * 64, tile_stride, num_tiles, pairs, begin > 0, true);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    memcpy(rows.out + r * rows.out_stride, values[r], static_cast<size_t>(num_tiles * kTile) * sizeof(float));
  }
}

inline void multiply_bf16_tiles(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                                int64_t num_tiles, float* out, int64_t out_stride) {
  const int64_t stride = tile_bytes(weight.format, weight.num_inputs), num_pairs = (weight.num_inputs + 1) / 2;
  const auto group_at = [&](int64_t r, int64_t c) {
    return Bf16Group{row<std::byte>(x, first + r), x.stride_bytes, out + r * out_stride + c * kTile, out_stride};
  };
  for (int64_t c = 0; c < num_tiles; c += 2) {
    const int64_t tiles = num_tiles - c < 2 ? 1 : 2;
    const std::byte* w = weight.data + (tile + c) * stride;
    if (num_rows < 16) {
      if (num_rows > 0) bf16_few_rows(group_at(0, c), num_rows, w, stride, tiles, num_pairs);
      continue;
    }
    for (int64_t r = 0; r < num_rows; r += 32) {
      // The last group may repeat rows of the one before: they get the same values again.
      const int64_t last = num_rows - 16, second = r + 16 < last ? r + 16 : last;
      const Bf16Group groups[] = {group_at(r < last ? r : last, c), group_at(second, c)};
      bf16_groups(groups, r + 16 < num_rows ? 2 : 1, w, stride, tiles, num_pairs, false, r == 0);
    }
  }
}

}  // namespace
}  // namespace quire

#else

namespace quire {
namespace {

// Other instruction sets have no state to set up.
class TileSession {
 public:
  TileSession(WeightFormat, int64_t) {}
  ~TileSession() {}
};

}  // namespace
}  // namespace quire
#endif
