// Products of int8 rows with 4- and 8-bit weights.
//
// The kernel keeps kRowsAtOnce rows by kTilesAtOnce tiles of sums in registers, so that a block's weights are unpacked
// and its scales converted once for all of these rows. Per block of 32 inputs, row and tile, AVX-512 needs eight
// VPDPBUSD, a multiplication and one or two fused multiply-adds: on Zen 4 all on the same two units, 11 cycles for 512
// products, of which 98 % are reached (benchmarks/kernels/gemm_quantised.py). On Zen 5 VPDPBUSD alone binds: products
// of 64 rows reach 91 to 97 % of its peak.
//
// On Zen 3, with AVX2, VPMADDUBSW and VPMADDWD run on two of four units, one of which multiplies floats too, and of
// each pair of a VPMADDUBSW and a VPADDW 1.6 a cycle begin. Products of 64 rows of 4-bit weights reach 63 % of that.
// That is what the busiest unit allows: of 2048 products it does 36 VPMADDUBSW and VPMADDWD, 12 of the multiplications
// of floats and a share of 56 additions, in 63 cycles. Scaling a row between the integer products of the next block,
// or with VPSRAD in place of VPMADDWD, was not faster; neither were two or six rows at once, q8 as two nibbles or
// by rows of int16. One scale for 256 activations of K-quants, whose own scales are then multiplied as integers, gave
// 0.92 to 1.11 of the speed.
#pragma once
#include <type_traits>

#include "isa/dots.h"
#include "isa/dots_codebook.h"
#include "isa/simd.h"
#include "isa/simd_f8.h"
#include "ops/kv_ahead.h"
#include "plan/types.h"

namespace quire {
namespace {

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 6, kTilesAtOnce = 2;  // 12 integer and 12 fp32 sums in 32 registers
constexpr bool kKeepsUnpacked = false;
#elif defined(__AVX2__) || defined(QUIRE_NEON)
constexpr int kRowsAtOnce = 4, kTilesAtOnce = 1;  // 8 integer sums in 16 registers; the fp32 sums are in L1
constexpr bool kKeepsUnpacked = true;             // for the other groups of rows
#else
constexpr int kRowsAtOnce = 1, kTilesAtOnce = 1;
constexpr bool kKeepsUnpacked = false;
#endif

// A tile of weights, block by block: `weights` are those of a chunk of its inputs, sums of part `part` begin with
// `start`, `product` makes of them the exact sum of products about the weights' centre, and `scale` and `minimum`
// belong to that.
// This one is of q4, q4m, q5 and q5m.
template <WeightFormat kFormat>
class QTile {
  static constexpr bool kHasFifth = upper_bits(kFormat) > 0;

 public:
  using Dots = std::conditional_t<kHasFifth, WideDots, NibbleDots>;
  static constexpr int kParts = 1;  // of a block, each with a scale of its own
  static constexpr bool kHasMinima = kFormat == WeightFormat::q4m || kFormat == WeightFormat::q5m;
  QTile() = default;
  QTile(const std::byte* data, int64_t blocks)
      : u_(reinterpret_cast<const uint8_t*>(data)),
        fifth_(u_ + blocks * 256),
        d_(reinterpret_cast<const uint16_t*>(fifth_ + (kHasFifth ? blocks * 64 : 0))),
        m_(d_ + blocks * kTile) {}
  const uint8_t* low(int64_t block, int chunk) const { return u_ + block * 256 + chunk * 64; }
  // The line with the bits above a chunk's nibbles.
  const uint8_t* upper(int64_t block, int) const { return fifth_ + block * 64; }
  typename Dots::Weights weights(int64_t block, int chunk) const {
    const typename Dots::Weights nibbles = Dots::load(low(block, chunk));
    if constexpr (kHasFifth) return Dots::with_fifth(nibbles, upper(block, chunk), chunk);
    return nibbles;
  }
  static Dots::Sums start(const ActBlock&, int) { return Dots::zero(); }
  static I32x16 product(Dots::Sums sums, const ActBlock& x) {
    constexpr int kLogOfCentre = kHasFifth ? 4 : 3;
    return kHasMinima ? Dots::total(sums) : Dots::total(sums) - shift_left<kLogOfCentre>(broadcast(x.sum));
  }
  F32x16 scale(int64_t block, int) const { return widen_f16(d_ + block * kTile); }
  F32x16 minimum(int64_t block) const { return widen_f16(m_ + block * kTile); }

 private:
  const uint8_t *u_, *fifth_;
  const uint16_t *d_, *m_;
};

template <>
class QTile<WeightFormat::q8> {
 public:
  using Dots = ByteDots;
  static constexpr int kParts = 1;
  static constexpr bool kHasMinima = false;
  QTile() = default;
  QTile(const std::byte* data, int64_t blocks)
      : u_(reinterpret_cast<const uint8_t*>(data)), d_(reinterpret_cast<const uint16_t*>(data + blocks * 512)) {}
  const uint8_t* low(int64_t block, int chunk) const { return u_ + block * 512 + chunk * 64; }
  Dots::Weights weights(int64_t block, int chunk) const {
    return Dots::load(u_ + block * 512 + chunk * Dots::kInputs * kTile);
  }
  static Dots::Sums start(const ActBlock&, int) { return Dots::zero(); }
  static I32x16 product(Dots::Sums sums, const ActBlock& x) { return Dots::total(sums, x.sum); }
  F32x16 scale(int64_t block, int) const { return widen_f16(d_ + block * kTile); }

 private:
  const uint8_t* u_;
  const uint16_t* d_;
};

// q4k, q5k, q6k and iq4xs: scales are those of types.h times those of the 256 inputs.
template <WeightFormat kFormat>
class SuperTile {
 public:
  using Dots = WideDots;
  static constexpr int kParts = kFormat == WeightFormat::q6k ? 2 : 1;
  static constexpr bool kHasMinima = kFormat == WeightFormat::q4k || kFormat == WeightFormat::q5k;
  SuperTile() = default;
  SuperTile(const std::byte* data, int64_t) : data_(reinterpret_cast<const uint8_t*>(data)) {}
  const uint8_t* low(int64_t block, int chunk) const { return at(block) + block % kBlocks * 256 + chunk * 64; }
  const uint8_t* upper(int64_t block, int chunk) const {
    const int64_t i = block % kBlocks;
    return at(block) + kAt.high + (kFormat == WeightFormat::q5k ? i * 64 : i * 128 + chunk / 2 * 64);
  }
  Dots::Weights weights(int64_t block, int chunk) const {
    const uint8_t* super = at(block);
    const int64_t i = block % kBlocks;
    const Dots::Weights low = Dots::load(super + i * 256 + chunk * 64);
    if constexpr (kFormat == WeightFormat::q5k) return Dots::with_fifth(low, super + kAt.high + i * 64, chunk);
    return Dots::with_upper(low, super + kAt.high + i * 128, chunk);
  }
  static Dots::Sums start(const ActBlock& x, int part) {
    if constexpr (kHasMinima) return Dots::zero();
    const I32x16 first = broadcast(x.first_sum);
    return zero_i() - shift_left<5>(part == 0 ? first : broadcast(x.sum) - first);
  }
  static I32x16 product(Dots::Sums sums, const ActBlock&) { return Dots::total(sums); }
  F32x16 scale(int64_t block, int part) const {
    const uint8_t *super = at(block), *scales = super + kAt.scales + (block % kBlocks * kParts + part) * kTile;
    if constexpr (kHasMinima) return halves(super) * widen_u8(scales);
    return load(reinterpret_cast<const float*>(super + kAt.d)) * widen_i8(scales);
  }
  F32x16 minimum(int64_t block) const {
    const uint8_t* super = at(block);
    const F32x16 m = widen_f16(reinterpret_cast<const uint16_t*>(super + kAt.d) + kTile);
    return broadcast(-1.0f) *
           (m * widen_u8(super + kAt.minima + block % kBlocks * kTile));  // -0 of 0, as decoders have it
  }

 protected:
  static constexpr SuperLayout kAt = super_layout(kFormat);
  static constexpr int64_t kBlocks = kSuper / kBlock;
  const uint8_t* at(int64_t block) const { return data_ + block / kBlocks * kAt.bytes; }
  static F32x16 halves(const uint8_t* super) { return widen_f16(reinterpret_cast<const uint16_t*>(super + kAt.d)); }

  const uint8_t* data_;
};
template <>
class QTile<WeightFormat::q5k> : public SuperTile<WeightFormat::q5k> {
  using SuperTile::SuperTile;
};
template <>
class QTile<WeightFormat::q6k> : public SuperTile<WeightFormat::q6k> {
  using SuperTile::SuperTile;
};
template <>
class QTile<WeightFormat::q4k> : public SuperTile<WeightFormat::q4k> {
 public:
  using Dots = NibbleDots;
  using SuperTile::SuperTile;
  Dots::Weights weights(int64_t block, int chunk) const { return Dots::load(low(block, chunk)); }
  static Dots::Sums start(const ActBlock&, int) { return Dots::zero(); }
  static I32x16 product(Dots::Sums sums, const ActBlock&) { return Dots::total(sums); }
};

constexpr bool has_codebook(WeightFormat format) { return format >= WeightFormat::iq4nl; }  // the last ones
constexpr Codebook codebook_of(WeightFormat format) {
  return format == WeightFormat::iq4nl || format == WeightFormat::iq4xs ? Codebook::iq4 : Codebook::e2m1;
}

template <WeightFormat kFormat>
  requires(has_codebook(kFormat) && !has_supers(kFormat))
class QTile<kFormat> {
 public:
  using Dots = CodebookDots<codebook_of(kFormat)>;
  static constexpr int kParts = kFormat == WeightFormat::nvfp4 ? 2 : 1;
  static constexpr bool kHasMinima = false;
  QTile() = default;
  QTile(const std::byte* data, int64_t blocks)
      : u_(reinterpret_cast<const uint8_t*>(data)),
        scales_(u_ + blocks * 256),
        of_rows_(scales_ + blocks * 2 * kTile) {}
  const uint8_t* low(int64_t block, int chunk) const { return u_ + block * 256 + chunk * 64; }
  Dots::Weights weights(int64_t block, int chunk) const { return Dots::load(low(block, chunk)); }
  static Dots::Sums start(const ActBlock& x, int part) {
    return Dots::start(kParts == 1 ? x.sum : part == 0 ? x.first_sum : x.sum - x.first_sum);
  }
  static I32x16 product(Dots::Sums sums, const ActBlock&) { return Dots::total(sums); }
  F32x16 scale(int64_t block, int part) const {
    if constexpr (kFormat == WeightFormat::mxfp4) return powers_of_two(scales_ + block * kTile);
    const uint8_t* scales = scales_ + (block * 2 + part) * kTile;
    if constexpr (kFormat == WeightFormat::iq4nl) return widen_f16(reinterpret_cast<const uint16_t*>(scales));
    return load(reinterpret_cast<const float*>(of_rows_)) * widen_e4m3(scales);
  }

 private:
  const uint8_t *u_, *scales_, *of_rows_;
};
template <>
class QTile<WeightFormat::iq4xs> : public SuperTile<WeightFormat::iq4xs> {
 public:
  using Dots = CodebookDots<Codebook::iq4>;
  using SuperTile::SuperTile;
  Dots::Weights weights(int64_t block, int chunk) const { return Dots::load(low(block, chunk)); }
  static Dots::Sums start(const ActBlock& x, int) { return Dots::start(x.sum); }
};

// Inputs that a line of 64 bytes holds for each output; the face of dots.h may take two lines at once.
constexpr int line_inputs(WeightFormat format) { return format == WeightFormat::q8 ? 4 : 8; }

// Weight i of a block of one output, as the integer that scales and minima belong to: `low` and `upper` are the four
// bytes of this output in its chunk's lines.
template <WeightFormat kFormat>
inline int32_t integer_of(uint32_t low, uint32_t upper, int i) {
  const int byte = i % 4 * 8, odd = i / 4 % 2, chunk = i / 8;
  if constexpr (kFormat == WeightFormat::q8) return static_cast<int32_t>(low >> byte & 255) - 128;
  const auto u = static_cast<int32_t>(low >> (byte + 4 * odd) & 15);
  if constexpr (kFormat == WeightFormat::q4) return u - 8;
  if constexpr (has_codebook(kFormat)) return Codes<codebook_of(kFormat)>::kIntegers[u];
  if constexpr (upper_bits(kFormat) == 1) {
    const int32_t whole = u | static_cast<int32_t>(upper >> (byte + 2 * chunk + odd) & 1) << 4;
    return kFormat == WeightFormat::q5 ? whole - 16 : whole;
  }
  if constexpr (upper_bits(kFormat) == 2) {
    return (u | static_cast<int32_t>(upper >> (byte + 4 * (chunk % 2) + 2 * odd) & 3) << 4) - 32;
  }
  return u;
}

// The four bytes of outputs `lane` to `lane` + count - 1 in the lines of a chunk.
template <WeightFormat kFormat>
inline void copy_lines(const QTile<kFormat>& tile, int64_t block, int chunk, int64_t lane, int64_t count, uint32_t* low,
                       uint32_t* upper) {
  memcpy(low, tile.low(block, chunk) + lane * 4, static_cast<size_t>(count) * 4);
  if constexpr (upper_bits(kFormat) > 0) {
    memcpy(upper, tile.upper(block, chunk) + lane * 4, static_cast<size_t>(count) * 4);
  }
}

template <WeightFormat... kFormats>
struct Formats {};
using IntegerFormats = Formats<WeightFormat::q4, WeightFormat::q4m, WeightFormat::q5, WeightFormat::q5m,
                               WeightFormat::q8, WeightFormat::q4k, WeightFormat::q5k, WeightFormat::q6k,
                               WeightFormat::iq4nl, WeightFormat::iq4xs, WeightFormat::mxfp4, WeightFormat::nvfp4>;

// Returns choose<format>() for one of them.
template <typename Choose>
inline auto choose_by_format(WeightFormat format, Choose choose) {
  auto chosen = choose.template operator()<WeightFormat::q8>();
  [&]<WeightFormat... kFormats>(Formats<kFormats...>) {
    ((format == kFormats ? void(chosen = choose.template operator()<kFormats>()) : void()), ...);
  }(IntegerFormats{});
  return chosen;
}

// With half of that attention waits longer, with twice as much products do.
constexpr int64_t kKvBytesOfBlock = 256;

// What to fetch during a block: `num_lines` lines of weights into L1, unless `beyond` is 0 also the lines `beyond`
// bytes after them into L2, then keys and values. The next block's lines of weights start `step` bytes later.
struct Ahead {
  const std::byte* weights;
  int num_lines;
  int64_t step, beyond;
  KvFetch::Bytes kv;
};

// How far ahead of its own reading a single group of rows fetches: nearer, lines come too late; farther, L1 has lost
// them. One row then reads at 83 to 99 % of the speed of plain reads, at 66 to 75 % a whole tile ahead (2 threads of a
// Xeon with AMX, tiles of 19 to 57 KB).
constexpr int64_t kNearBytes = 1536;
constexpr int64_t beyond_bytes(WeightFormat format) { return has_supers(format) ? 2560 : 6656; }

#if defined(QUIRE_ROW_PAIRS)
constexpr bool kPairsOfRows = true;
template <class Dots>
using KeptWeights = typename Dots::PairWeights;
#else
constexpr bool kPairsOfRows = false;
template <class Dots>
using KeptWeights = typename Dots::Weights;
#endif

// A block of a tile, unpacked.
template <typename Tile>
struct Unpacked {
  KeptWeights<typename Tile::Dots> weights[kBlock / Tile::Dots::kInputs];
  F32x16 scales[Tile::kParts], minimum;
};

// A group of rows unpacks its weights, unpacks and keeps them for the groups after it, or reads kept ones.
enum class Source { packed, keeps, kept };

// Blocks `begin` to `end` of a tile of `blocks`. The sums of the blocks before rest in `out`.
struct QCut {
  int64_t blocks, begin, end;
};

// Adds the products of a block's part to the sums of kRows rows, two rows at once. An odd last row is taken twice.
template <typename Tile, int kRows, Source kSource>
[[gnu::always_inline]] inline void add_pairs(const Tile& tile, int64_t block, int part, const std::byte* x,
                                             int64_t x_stride, Unpacked<Tile>* kept, I32x16 (&sums)[kRows][1]) {
  using Dots = typename Tile::Dots;
  constexpr int kChunks = kBlock / Dots::kInputs / Tile::kParts, kPairs = (kRows + 1) / 2;
  const auto row = [&](int r, int i) {
    const int at = r < kRows ? r : kRows - 1;
    return reinterpret_cast<const ActBlock*>(x + at * x_stride)->q + i * Dots::kInputs;
  };
  typename Dots::PairSums pairs[kPairs];
  QUIRE_UNROLL for (int p = 0; p < kPairs; ++p) pairs[p] = Dots::no_pair();
  QUIRE_UNROLL for (int i = part * kChunks; i < (part + 1) * kChunks; ++i) {
    typename Dots::PairWeights w;
    if constexpr (kSource == Source::kept) {
      w = kept->weights[i];
    } else {
      w = Dots::paired(tile.weights(block, i));
      if constexpr (kSource == Source::keeps) kept->weights[i] = w;
    }
    QUIRE_UNROLL for (int p = 0; p < kPairs; ++p) Dots::add_pair(pairs[p], w, row(2 * p, i), row(2 * p + 1, i));
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    sums[r][0] = sums[r][0] + (r % 2 == 0 ? Dots::first_of(pairs[r / 2]) : Dots::second_of(pairs[r / 2]));
  }
}

// y of kRows rows from x on (stride x_stride bytes) and of kTiles tiles, to out[row][16 * kTiles].
template <WeightFormat kFormat, int kRows, int kTiles, Source kSource>
void multiply_tiles(const std::byte* const* data, const std::byte* x, int64_t x_stride, QCut cut, Ahead ahead,
                    Unpacked<QTile<kFormat>>* kept, float* out, int64_t out_stride) {
  using Tile = QTile<kFormat>;
  using Dots = typename Tile::Dots;
  constexpr int kChunks = kBlock / Dots::kInputs / Tile::kParts;
  static_assert(kTiles == 1 || kSource == Source::packed);
  Tile tiles[kTiles];
  QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) tiles[c] = Tile(data[c], cut.blocks);
  const int64_t begin = kSource == Source::packed ? 0 : cut.begin;
  F32x16 y[kRows][kTiles];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) {
      y[r][c] = begin > 0 ? load(out + r * out_stride + c * kTile) : zero();
    }
  }
  x += begin * static_cast<int64_t>(sizeof(ActBlock));
  for (int64_t b = begin; b < cut.end; ++b, x += sizeof(ActBlock)) {
    for (int i = 0; i < ahead.num_lines; ++i) prefetch_l1(ahead.weights + i * 64);
    for (int i = 0; i < ahead.num_lines && ahead.beyond > 0; ++i) prefetch(ahead.weights + ahead.beyond + i * 64);
    ahead.weights += ahead.step;
    if (ahead.kv.begin < ahead.kv.end) {
      QUIRE_UNROLL for (int i = 0; i < kKvBytesOfBlock; i += 64) prefetch(ahead.kv.begin + i);
      ahead.kv.begin += kKvBytesOfBlock;
    }
    QUIRE_UNROLL for (int part = 0; part < Tile::kParts; ++part) {
      typename Dots::Sums sums[kRows][kTiles];
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        const auto start = Tile::start(*reinterpret_cast<const ActBlock*>(x + r * x_stride), part);
        QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) sums[r][c] = start;
      }
      if constexpr (kPairsOfRows && kRows > 1) {
        add_pairs<Tile, kRows, kSource>(tiles[0], b, part, x, x_stride, kept, sums);
      } else {
        QUIRE_UNROLL for (int i = part * kChunks; i < (part + 1) * kChunks; ++i) {
          typename Dots::Weights w[kTiles];
          QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) {
            if constexpr (kSource == Source::kept) {
              w[c] = kept->weights[i];
            } else {
              w[c] = tiles[c].weights(b, i);
              if constexpr (kSource == Source::keeps) kept->weights[i] = w[c];
            }
          }
          QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
            const int8_t* q = reinterpret_cast<const ActBlock*>(x + r * x_stride)->q + i * Dots::kInputs;
            QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) sums[r][c] = Dots::add(sums[r][c], w[c], q);
          }
        }
      }
      QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) {
        F32x16 d, m;
        if constexpr (kSource == Source::kept) {
          d = kept->scales[part];
          if constexpr (Tile::kHasMinima) m = kept->minimum;
        } else {
          d = tiles[c].scale(b, part);
          if constexpr (Tile::kHasMinima) m = tiles[c].minimum(b);
          if constexpr (kSource == Source::keeps) kept->scales[part] = d;
          if constexpr (kSource == Source::keeps && Tile::kHasMinima) kept->minimum = m;
        }
        QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
          const auto& acts = *reinterpret_cast<const ActBlock*>(x + r * x_stride);
          const F32x16 p = to_float(Tile::product(sums[r][c], acts));
          y[r][c] = fma(p, d * broadcast(acts.scale), y[r][c]);
          if constexpr (Tile::kHasMinima) y[r][c] = fma(m, broadcast(acts.scaled_sum), y[r][c]);
        }
      }
    }
    if constexpr (kSource != Source::packed) ++kept;
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int c = 0; c < kTiles; ++c) store(out + r * out_stride + c * kTile, y[r][c]);
  }
}

template <WeightFormat kFormat>
using MultiplyTiles = void (*)(const std::byte* const*, const std::byte*, int64_t, QCut, Ahead,
                               Unpacked<QTile<kFormat>>*, float*, int64_t);

// The kernel for 1 … kRowsAtOnce rows; of several groups the first has at least half as many, each other one more.
template <WeightFormat kFormat, int kTiles, Source kSource, int kRows = kRowsAtOnce>
inline MultiplyTiles<kFormat> multiply_tiles_for(int64_t num_rows) {
  constexpr int kFewest = kSource == Source::packed ? 1 : kRowsAtOnce / 2 + (kSource == Source::kept ? 1 : 0);
  if constexpr (kRows > kFewest) {
    if (num_rows < kRows) return multiply_tiles_for<kFormat, kTiles, kSource, kRows - 1>(num_rows);
  }
  return multiply_tiles<kFormat, kRows, kTiles, kSource>;
}

// Blocks that are kept unpacked: at most 14 KB, so that they stay in L1 beside a group's rows.
constexpr int64_t kKeptBlocks = 18;

// Whether the first of several groups keeps what it unpacks. The stores cost it 10 to 15 %. On Zen 3 products of 64
// rows are then 13 % faster in q4k, 20 % in q5k and 28 % in q6k, of 8 rows 1, 6 and 9 %; 4 % in iq4nl, 8 % in mxfp4 and
// 28 % in nvfp4, of 8 rows 0, 1 and 6 %; 14 % in q5 and 11 % in q5m. q4 and q4m take three groups and rows of one cut
// to gain, 4 %: with more cuts they lose up to 3 %. q8 has nothing to unpack.
constexpr bool may_keep(WeightFormat format) {
  return kKeepsUnpacked && (kPairsOfRows || format != WeightFormat::q8);  // pairs are rearranged in any format
}
constexpr bool keeps_unpacked(WeightFormat format, int64_t num_rows, int64_t num_inputs) {
  if (!may_keep(format)) return false;
  if (kPairsOfRows) return num_rows > kRowsAtOnce;
  if (has_supers(format) || has_codebook(format) || upper_bits(format) > 0) return num_rows > kRowsAtOnce;
  return num_rows > 2 * kRowsAtOnce && num_inputs <= kKeptBlocks * kBlock;
}

// Rows are dealt to as few groups as hold them, evenly: a last group of one row would be half as fast.
template <WeightFormat kFormat, int kTiles, bool kKeeps>
void multiply_q_by(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                   int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(kFormat, weight.num_inputs);
  const int64_t groups = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t cuts = kKeeps ? (blocks + kKeptBlocks - 1) / kKeptBlocks : 1;
  alignas(64) Unpacked<QTile<kFormat>> kept[kKeeps ? kKeptBlocks : 1];
  // Several groups all fetch the next tiles' weights: a first one that fetched them alone would wait for memory, and
  // the others leave it idle.
  const auto num_lines = static_cast<int>((kTiles * bytes / 64 + blocks * groups - 1) / (blocks * groups));
  const bool is_near = groups == 1 && kTiles == 1;
  for (int64_t c = 0; c < num_tiles; c += kTiles) {
    const std::byte* tiles[kTiles];
    for (int i = 0; i < kTiles; ++i) tiles[i] = weight.data + (tile + c + i) * bytes;
    const std::byte* next = tiles[0] + (is_near ? kNearBytes : kTiles * bytes);
    const int64_t step = is_near ? bytes / blocks : num_lines * 64;
    for (int64_t i = 0; i < cuts * groups; ++i) {
      const int64_t g = i % groups, begin = num_rows * g / groups, end = num_rows * (g + 1) / groups;
      const QCut cut = {blocks, blocks * (i / groups) / cuts, blocks * (i / groups + 1) / cuts};
      const int64_t width = cut.end - cut.begin;
      const Ahead ahead = {next, num_lines, step, is_near ? beyond_bytes(kFormat) : 0,
                           g == 0 ? KvFetch::Bytes{} : fetch.take(width * kKvBytesOfBlock)};
      next += width * step;
      MultiplyTiles<kFormat> multiply;
      if constexpr (kKeeps) {
        multiply = g == 0 ? multiply_tiles_for<kFormat, kTiles, Source::keeps>(end - begin)
                          : multiply_tiles_for<kFormat, kTiles, Source::kept>(end - begin);
      } else {
        multiply = multiply_tiles_for<kFormat, kTiles, Source::packed>(end - begin);
      }
      multiply(tiles, x.data + (first + begin) * x.stride_bytes, x.stride_bytes, cut, ahead, kept,
               out + begin * out_stride + c * kTile, out_stride);
    }
  }
}

// Few rows wait for memory, which delivers one stream of weights faster than several.
template <WeightFormat kFormat>
void multiply_q_as(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                   int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const bool at_once = num_rows > kRowsAtOnce && num_tiles % kTilesAtOnce == 0;
  const bool keeps = keeps_unpacked(kFormat, num_rows, weight.num_inputs);
  const auto by = keeps     ? multiply_q_by<kFormat, 1, may_keep(kFormat)>
                  : at_once ? multiply_q_by<kFormat, kTilesAtOnce, false>
                            : multiply_q_by<kFormat, 1, false>;
  by(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
}

// See gemm.h: the order of operations.
inline void multiply_q(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  const auto multiply_as =
      choose_by_format(weight.format, []<WeightFormat kFormat>() { return &multiply_q_as<kFormat>; });
  multiply_as(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
}

}  // namespace
}  // namespace quire
