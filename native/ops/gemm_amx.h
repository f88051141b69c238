// Products of bf16 rows on AMX's tile registers (isa/tiles.h). Their bits are their own: per 32 inputs, the last few
// padded with zeros, y = y + (even + odd), of two chains of fused multiply-adds of which each starts at 0.
//
// bf16 weights are multiplied as they lie. 4- and 8-bit weights are dequantised to bf16 right before: w in fp32 by one
// fused multiply-add, or with a codebook by a multiplication, times 1.0028, the lowest 16 bits cut off. That factor
// centres the error of cutting, whose mean square is then 12 % above that of rounding to nearest; a weight that is a
// bf16 stays as it is.
#pragma once
#include "ops/gemm_q.h"
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

constexpr int64_t kFewTileRows = 64;  // up to here a weight is used once when it has been dequantised
constexpr int64_t kCutBlocks = 9;     // of two tiles: 18 KiB of bf16, which L1 holds beside 32 rows of them
constexpr int64_t kBlockHalves = kTile * kBlock;
constexpr float kCentred = 1.0028f;

// How blocks of a format become bf16: numbers of kBits, whose lowest four (of q8 all eight) are where types.h says.
template <WeightFormat kFormat>
struct TileBlock {
  static constexpr bool kIsBytes = kFormat == WeightFormat::q8;
  static constexpr int kBits = kIsBytes ? 8 : 4 + upper_bits(kFormat);
  static constexpr float kLevels = 1 << kBits;
  static constexpr int kLowBits = kIsBytes ? 8 : 4;
  static constexpr uint32_t kLowMask = ((1u << kLowBits) - 1) << (23 - kBits);
  static constexpr uint32_t kHighMask = 0x007fffff & ~((1u << (23 - kBits + kLowBits)) - 1);

  struct Scales {
    __m512 scale, base;
  };
  static Scales scales(const QTile<kFormat>& tile, int64_t block, int part) {
    const __m512 d = tile.scale(block, part).v, centred = _mm512_set1_ps(kCentred), levels = _mm512_set1_ps(kLevels);
    if constexpr (has_codebook(kFormat)) return {_mm512_mul_ps(d, centred), _mm512_setzero_ps()};
    __m512 least;
    if constexpr (QTile<kFormat>::kHasMinima) {
      least = _mm512_fnmadd_ps(d, levels, tile.minimum(block).v);
    } else {
      least = _mm512_mul_ps(d, _mm512_set1_ps(-1.5f * kLevels));  // the centre is half of the levels
    }
    return {_mm512_mul_ps(_mm512_mul_ps(d, levels), centred), _mm512_mul_ps(least, centred)};
  }

  static __m512i shifted(__m512i x, int left) {
    return left >= 0 ? _mm512_slli_epi32(x, left) : _mm512_srli_epi32(x, -left);
  }
  static __m512i masked_or(__m512i x, uint32_t mask, __m512i other) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(static_cast<int>(mask)), other, 0xea);
  }
  // The numbers whose lowest bit is bit `at` of each lane: at the top of a fraction, u is 1 + u / 2^kBits.
  static __m512 value(__m512i low, int at, __m512i high, int high_at, const Scales& scales) {
    if constexpr (has_codebook(kFormat)) {
      const auto* codebook = reinterpret_cast<const __m128i*>(Codes<codebook_of(kFormat)>::kIntegers);
      const __m512 integers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codebook)));
      // Of an index the instruction takes the lowest four bits.
      return _mm512_mul_ps(_mm512_permutexvar_ps(shifted(low, -at), integers), scales.scale);
    }
    __m512i x = masked_or(shifted(low, 23 - kBits - at), kLowMask, _mm512_set1_epi32(0x3f800000));
    if constexpr (kBits > kLowBits) x = masked_or(shifted(high, 23 - kBits + kLowBits - high_at), kHighMask, x);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), scales.scale, scales.base);
  }
  // The upper halves of two inputs' weights: one row of pairs.
  static void put(__m512 even, __m512 odd, uint16_t* out) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_store_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd)));
  }

  // Block `b` of a tile as [16 pairs of inputs][16 outputs][2].
  static void dequantise(const QTile<kFormat>& tile, int64_t b, uint16_t* out) {
    constexpr int kParts = QTile<kFormat>::kParts, kChunks = kIsBytes ? 8 : 4;
    Scales of[kParts];
    QUIRE_UNROLL for (int part = 0; part < kParts; ++part) of[part] = scales(tile, b, part);
    QUIRE_UNROLL for (int j = 0; j < kChunks; ++j) {
      const __m512i low = _mm512_loadu_si512(tile.low(b, j));
      __m512i high = low;
      if constexpr (kBits > kLowBits) high = _mm512_loadu_si512(tile.upper(b, j));
      const Scales& mine = of[j * kParts / kChunks];
      QUIRE_UNROLL for (int row = 0; row < (kIsBytes ? 2 : 4); ++row) {
        // Two bytes of each lane, and of these the low or the high half.
        const int half = kIsBytes ? 0 : row / 2, byte = row % 2 * 2, at = 8 * byte + 4 * half;
        const int high_at = 8 * byte + (kBits == 6 ? j % 2 * 4 + 2 * half : 2 * j + half);
        put(value(low, at, high, high_at, mine), value(low, at + 8, high, high_at + 8, mine),
            out + (j * (kIsBytes ? 2 : 4) + row) * 32);
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
// stored must have reached L1. Weights are fetched into L2: L1 has too few places for misses to hide memory.
template <WeightFormat kFormat, int kGroups>
void multiply_few(const Weight& weight, const std::byte* const* x, int64_t stride, int64_t tile, int64_t num_tiles,
                  KvFetch& fetch, float* const* out, int64_t out_stride) {
  constexpr int64_t kLead = 2, kBuffers = 4, kAhead = 12 << 10, kKvBytes = 256;
  const int64_t blocks = weight.num_inputs / kBlock, total = num_tiles * blocks;
  const int64_t bytes = tile_bytes(kFormat, weight.num_inputs), lines = (bytes / 64 + blocks - 1) / blocks;
  const std::byte* data = weight.data + tile * bytes;
  alignas(64) uint16_t w[kBuffers][kBlockHalves];
  QTile<kFormat> next(data, blocks);
  int64_t ready = 0, block = 0;
  const auto dequantise = [&] {
    if (ready == total) return;
    TileBlock<kFormat>::dequantise(next, block, w[ready % kBuffers]);
    ++ready;
    if (++block == blocks) block = 0, next = QTile<kFormat>(data + ready / blocks * bytes, blocks);
  };
  for (int64_t i = 0; i < kLead; ++i) dequantise();
  for (int64_t c = 0, done = 0; c < num_tiles; ++c) {
    const std::byte* ahead = data + c * bytes + kAhead;
    tile_zero<0>();
    if constexpr (kGroups > 1) tile_zero<1>();
    if constexpr (kGroups > 2) tile_zero<2>();
    if constexpr (kGroups > 3) tile_zero<3>();
    for (int64_t b = 0; b < blocks; ++b, ++done) {
      for (int64_t i = 0; i < lines; ++i, ahead += 64) prefetch(ahead);
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
  constexpr int64_t kPanelAhead = 6 << 10;
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(kFormat, weight.num_inputs);
  const int64_t lines = (bytes / 64 + blocks - 1) / blocks;
  alignas(64) uint16_t panel[2][kCutBlocks * kBlockHalves];
  for (int64_t c = 0; c < num_tiles; c += 2) {
    const int64_t tiles = num_tiles - c < 2 ? 1 : 2;
    for (int64_t begin = 0; begin < blocks; begin += kCutBlocks) {
      const int64_t count = blocks - begin < kCutBlocks ? blocks - begin : kCutBlocks;
      for (int64_t i = 0; i < tiles; ++i) {
        const std::byte* data = weight.data + (tile + c + i) * bytes;
        const std::byte* ahead = data + begin * lines * 64 + kPanelAhead;
        const QTile<kFormat> from(data, blocks);
        for (int64_t b = 0; b < count; ++b) {
          for (int64_t k = 0; k < lines; ++k, ahead += 64) prefetch(ahead);
          TileBlock<kFormat>::dequantise(from, begin + b, panel[i] + b * kBlockHalves);
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

// See gemm.h.
inline void multiply_tiles(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                           int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const auto multiply_as =
      choose_by_format(weight.format, []<WeightFormat kFormat>() { return &multiply_tiles_as<kFormat>; });
  if (num_rows > 0) multiply_as(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
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
