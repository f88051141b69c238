// Products of bf16 rows on AMX's tile registers (isa/tiles.h). Their bits are their own: per 32 inputs, the last few
// padded with zeros, y = y + (even + odd), of two chains of fused multiply-adds of which each starts at 0.
//
// bf16 weights are multiplied as they lie. 4- and 8-bit weights are dequantised to bf16 right before: w in fp32 by one
// fused multiply-add, times 1.0028, the lowest 16 bits cut off. That factor centres the error of cutting, whose mean
// square is then 12 % above that of rounding to nearest; a weight that is a bf16 stays as it is.
#pragma once
#include "ops/kv_ahead.h"
#include "plan/types.h"

#if defined(QUIRE_TILES)
#include "isa/simd.h"
#include "isa/tiles.h"

namespace quire {
namespace {

// The tile registers of this thread: sums 0 … 3, rows of activations 4 and 5, weights 6 and 7. Configuring takes 45 ns,
// and context switches are dearer while they are in use.
thread_local int64_t configured_rows = 0;

// As many rows of activations, at most 16; the other tiles are whole.
inline void use_rows(int64_t num_rows) {
  if (configured_rows == num_rows) return;
  TileShape shapes[kNumTiles];
  for (int i = 0; i < kNumTiles; ++i) shapes[i] = {static_cast<uint8_t>(i < 6 ? num_rows : 16), 64};
  configure_tiles(shapes);
  configured_rows = num_rows;
}

// For as long as a thread multiplies rows of this type.
class TileSession {
 public:
  explicit TileSession(RowType type) {
    if (type == RowType::bf16) use_rows(16);
  }
  ~TileSession() {
    if (configured_rows > 0) release_tiles();
    configured_rows = 0;
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

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

// --- 4- and 8-bit weights: see pack.h for their order
// -----------------------------------------------------------------

constexpr int64_t kFewTileRows = 64;    // up to here a weight is used once when it has been dequantised
constexpr int64_t kMostTileRows = 256;  // of one call
constexpr int64_t kCutBlocks = 18;      // of two tiles: 36 KiB of bf16, which L1 holds
constexpr int64_t kBlockHalves = kTile * kBlock;
constexpr float kCentred = 1.0028f;

// The weights of one tile: integers and scales, from some block on.
struct TileWeights {
  const uint8_t* u;
  const uint16_t* d;
  const uint16_t* m;  // of q4m
};

template <WeightFormat kFormat>
struct TileBlock {
  static constexpr bool kBytes = kFormat == WeightFormat::q8, kMinima = kFormat == WeightFormat::q4m;
  static constexpr int64_t kSize = kBytes ? 512 : 256;

  static TileWeights weights(const Weight& weight, int64_t tile, int64_t block) {
    const int64_t blocks = weight.num_inputs / kBlock;
    const std::byte* data = weight.data + tile * tile_bytes(kFormat, weight.num_inputs);
    const auto* d = reinterpret_cast<const uint16_t*>(data + blocks * kSize) + block * kTile;
    return {reinterpret_cast<const uint8_t*>(data) + block * kSize, d, d + blocks * kTile};
  }

  // A number of 4 or 8 bits, shifted to the top of a fraction, is 1 + u / 16 or 1 + u / 256.
  static __m512 value(__m512i shifted, __m512 scale, __m512 base) {
    const __m512i fraction = _mm512_set1_epi32(kBytes ? 0x007f8000 : 0x00780000), one = _mm512_set1_epi32(0x3f800000);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, fraction, one, 0xea)), scale, base);
  }
  // The upper halves of two inputs' weights: one row of pairs.
  static void put(__m512 even, __m512 odd, uint16_t* out) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_store_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd)));
  }

  // Block `b` from `from` on as [16 pairs of inputs][16 outputs][2].
  static void dequantise(const TileWeights& from, int64_t b, uint16_t* out) {
    const __m512 d = widen_f16(from.d + b * kTile).v, centred = _mm512_set1_ps(kCentred);
    const __m512 scale = _mm512_mul_ps(_mm512_mul_ps(d, _mm512_set1_ps(kBytes ? 256.0f : 16.0f)), centred);
    const __m512 least = kMinima ? _mm512_fnmadd_ps(d, _mm512_set1_ps(16.0f), widen_f16(from.m + b * kTile).v)
                                 : _mm512_mul_ps(d, _mm512_set1_ps(kBytes ? -384.0f : -24.0f));
    const __m512 base = _mm512_mul_ps(least, centred);
    const uint8_t* chunk = from.u + b * kSize;
    QUIRE_UNROLL for (int j = 0; j < kSize / 64; ++j, chunk += 64) {
      const __m512i p = _mm512_loadu_si512(chunk);
      if constexpr (kBytes) {
        put(value(_mm512_slli_epi32(p, 15), scale, base), value(_mm512_slli_epi32(p, 7), scale, base), out + j * 64);
        put(value(_mm512_srli_epi32(p, 1), scale, base), value(_mm512_srli_epi32(p, 9), scale, base),
            out + j * 64 + 32);
      } else {
        uint16_t* rows = out + j * 128;
        put(value(_mm512_slli_epi32(p, 19), scale, base), value(_mm512_slli_epi32(p, 11), scale, base), rows);
        put(value(_mm512_slli_epi32(p, 3), scale, base), value(_mm512_srli_epi32(p, 5), scale, base), rows + 32);
        put(value(_mm512_slli_epi32(p, 15), scale, base), value(_mm512_slli_epi32(p, 7), scale, base), rows + 64);
        put(value(_mm512_srli_epi32(p, 1), scale, base), value(_mm512_srli_epi32(p, 9), scale, base), rows + 96);
      }
    }
  }
};

// kGroups x 16 rows by one block of a tile, whose first 16 rows … lie at x.
template <int kGroups>
inline void multiply_block(const uint16_t* w, const std::byte* const* x, int64_t at, int64_t stride) {
  tile_load<6>(w, 64);
  tile_load<4>(x[0] + at, stride);
  tile_dot_bf16<0, 4, 6>();
  if constexpr (kGroups > 1) {
    tile_load<5>(x[1] + at, stride);
    tile_dot_bf16<1, 5, 6>();
  }
  if constexpr (kGroups > 2) {
    tile_load<4>(x[2] + at, stride);
    tile_dot_bf16<2, 4, 6>();
  }
  if constexpr (kGroups > 3) {
    tile_load<5>(x[3] + at, stride);
    tile_dot_bf16<3, 5, 6>();
  }
}

// At most 64 rows. While the tile unit multiplies a block, the vector units dequantise the second next one: what was
// stored must have reached L1.
template <WeightFormat kFormat, int kGroups>
void multiply_few(const Weight& weight, const std::byte* const* x, int64_t stride, int64_t tile, int64_t num_tiles,
                  KvFetch& fetch, float* const* out, int64_t out_stride) {
  using Block = TileBlock<kFormat>;
  constexpr int64_t kLead = 2, kBuffers = 4, kAhead = 40, kKvBytes = 256;
  const int64_t blocks = weight.num_inputs / kBlock, total = num_tiles * blocks;
  alignas(64) uint16_t w[kBuffers][kBlockHalves];
  TileWeights next = Block::weights(weight, tile, 0);
  int64_t ready = 0, block = 0;
  const auto dequantise = [&] {
    if (ready == total) return;
    Block::dequantise(next, block, w[ready % kBuffers]);
    ++ready;
    if (++block == blocks) block = 0, next = Block::weights(weight, tile + ready / blocks, 0);
  };
  for (int64_t i = 0; i < kLead; ++i) dequantise();
  for (int64_t c = 0, done = 0; c < num_tiles; ++c) {
    tile_zero<0>();
    if constexpr (kGroups > 1) tile_zero<1>();
    if constexpr (kGroups > 2) tile_zero<2>();
    if constexpr (kGroups > 3) tile_zero<3>();
    for (int64_t b = 0; b < blocks; ++b, ++done) {
      const uint8_t* ahead = next.u + (block + kAhead) * Block::kSize;
      QUIRE_UNROLL for (int64_t i = 0; i < Block::kSize; i += 64) prefetch(ahead + i);
      if constexpr (Block::kMinima) prefetch(next.m + (block + kAhead) * kTile);
      prefetch(next.d + (block + kAhead) * kTile);
      const KvFetch::Bytes kv = fetch.take(kKvBytes);
      for (const std::byte* at = kv.begin; at < kv.end; at += 64) prefetch(at);
      multiply_block<kGroups>(w[done % kBuffers], x, b * kStepBytes, stride);
      dequantise();
    }
    tile_store<0>(out[0] + c * kTile, out_stride * 4);
    if constexpr (kGroups > 1) tile_store<1>(out[1] + c * kTile, out_stride * 4);
    if constexpr (kGroups > 2) tile_store<2>(out[2] + c * kTile, out_stride * 4);
    if constexpr (kGroups > 3) tile_store<3>(out[3] + c * kTile, out_stride * 4);
  }
}

inline void multiply_panel(const Bf16Group* groups, int64_t num_groups, const uint16_t* panel, int64_t num_tiles,
                           int64_t num_blocks, bool resumes) {
  bf16_groups(groups, num_groups, reinterpret_cast<const std::byte*>(panel), kCutBlocks * kBlockHalves * 2, num_tiles,
              num_blocks * 16, resumes, false);
}

template <WeightFormat kFormat>
void multiply_tiles_as(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  using Block = TileBlock<kFormat>;
  use_rows(num_rows < 16 ? num_rows : 16);
  if (num_rows <= kFewTileRows) {
    const int64_t last = num_rows < 16 ? 0 : num_rows - 16, groups = (num_rows + 15) / 16;
    const std::byte* from[4];
    float* to[4];
    for (int64_t g = 0; g < groups; ++g) {
      // Rows of the last group may have been in the one before: they get the same values again.
      const int64_t begin = g * 16 < last ? g * 16 : last;
      from[g] = row<std::byte>(x, first + begin);
      to[g] = out + begin * out_stride;
    }
    constexpr decltype(&multiply_few<kFormat, 1>) kFew[] = {multiply_few<kFormat, 1>, multiply_few<kFormat, 2>,
                                                            multiply_few<kFormat, 3>, multiply_few<kFormat, 4>};
    return kFew[groups - 1](weight, from, x.stride_bytes, tile, num_tiles, fetch, to, out_stride);
  }
  const int64_t blocks = weight.num_inputs / kBlock;
  alignas(64) uint16_t panel[2][kCutBlocks * kBlockHalves];
  for (int64_t c = 0; c < num_tiles; c += 2) {
    const int64_t tiles = num_tiles - c < 2 ? 1 : 2;
    for (int64_t begin = 0; begin < blocks; begin += kCutBlocks) {
      const int64_t count = blocks - begin < kCutBlocks ? blocks - begin : kCutBlocks;
      for (int64_t i = 0; i < tiles; ++i) {
        const TileWeights from = Block::weights(weight, tile + c + i, begin);
        for (int64_t b = 0; b < count; ++b) {
          QUIRE_UNROLL for (int64_t k = 0; k < Block::kSize; k += 64) {
            prefetch(from.u + (b + kCutBlocks) * Block::kSize + k);
          }
          Block::dequantise(from, b, panel[i] + b * kBlockHalves);
        }
      }
      const auto group_at = [&](int64_t r) {
        return Bf16Group{row<std::byte>(x, first + r) + begin * kStepBytes, x.stride_bytes,
                         out + r * out_stride + c * kTile, out_stride};
      };
      for (int64_t r = 0; r < num_rows; r += 32) {
        const int64_t left = num_rows - r;
        const Bf16Group pair[] = {group_at(r), group_at(left >= 32 ? r + 16 : r)};
        use_rows(left < 16 ? left : 16);
        multiply_panel(pair, left >= 32 ? 2 : 1, panel[0], tiles, count, begin > 0);
        if (left <= 16 || left >= 32) continue;
        const Bf16Group rest[] = {group_at(r + 16), {}};
        use_rows(left - 16);
        multiply_panel(rest, 1, panel[0], tiles, count, begin > 0);
      }
      use_rows(16);
    }
  }
}

// See gemm.h. At most kMostTileRows rows.
inline void multiply_tiles(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                           int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const auto as = weight.format == WeightFormat::q4    ? multiply_tiles_as<WeightFormat::q4>
                  : weight.format == WeightFormat::q4m ? multiply_tiles_as<WeightFormat::q4m>
                                                       : multiply_tiles_as<WeightFormat::q8>;
  if (num_rows > 0) as(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
}

}  // namespace
}  // namespace quire

#else

namespace quire {
namespace {

// Other instruction sets have no state to set up.
class TileSession {
 public:
  explicit TileSession(RowType) {}
  ~TileSession() {}
};

}  // namespace
}  // namespace quire
#endif
