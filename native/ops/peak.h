// What the processor does at best, for rooflines: multiply-adds on registers, and reading memory.
#pragma once
#include "isa/dots.h"
#include "isa/simd_bf16.h"
#include "ops/gemm_amx.h"
#include "plan/op.h"

namespace quire {

// `rounds` times kPeakSums vector operations (kPeakDots of int8) by each thread: of fp32, of pairs of bf16, or of int8;
// or all of the thread's share of `bytes` bytes read. operations[thread] is the number of multiply-adds, or of bytes
// read.
struct PeakOp {
  int32_t kind;  // 0 fp32, 1 bf16, 2 int8, 3 reading
  int64_t rounds;
  const std::byte* data;  // at least 1 KiB
  int64_t bytes;
  int64_t* operations;
};

namespace {

// Sums in registers: enough to hide the latency of a multiply-add. Sums of dot products are as many as fit beside their
// weights, which are unpacked once: products of many rows share that.
#if defined(__AVX512F__)
constexpr int kPeakSums = 12, kPeakDots = 12, kPeakWeights = 12;
using PeakDots = ByteDots;  // VNNI multiplies bytes; nibbles it must unpack first
#elif defined(__AVXVNNI__)
constexpr int kPeakSums = 5, kPeakDots = 5, kPeakWeights = 1;
using PeakDots = ByteDots;
#else
constexpr int kPeakSums = 5, kPeakDots = 4, kPeakWeights = 1;
using PeakDots = NibbleDots;
#endif

// sums[i] = next(sums[i], i, round), which start with the bytes of `data`: the compiler must take all for different.
// Returns the number of these operations.
template <int kSums, typename Sum, typename Next>
int64_t peak_rounds(int64_t rounds, const std::byte* data, std::byte* out, Next next) {
  Sum sums[kSums];
  QUIRE_UNROLL for (int i = 0; i < kSums; ++i) memcpy(&sums[i], data + i * 64, sizeof(Sum));
  for (int64_t round = 0; round < rounds; ++round) {
    QUIRE_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = next(sums[i], i, round);
  }
  QUIRE_UNROLL for (int i = 0; i < kSums; ++i) memcpy(out + i * 64, &sums[i], sizeof(Sum));
  return rounds * kSums;
}

#if defined(QUIRE_TILES)
// Four sums of 16 x 16 hide the latency of a tile product.
inline int64_t peak_of_tiles(const PeakOp& op, std::byte* out) {
  constexpr TileShape kAll[] = {{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}};
  configure_tiles(kAll);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(), tile_zero<4>(), tile_zero<5>();
  for (int64_t round = 0; round < op.rounds; ++round) {
    if (op.kind == 2) {
      tile_dot_s8<0, 4, 5>(), tile_dot_s8<1, 4, 5>(), tile_dot_s8<2, 4, 5>(), tile_dot_s8<3, 4, 5>();
    } else {
      tile_dot_bf16<0, 4, 5>(), tile_dot_bf16<1, 4, 5>(), tile_dot_bf16<2, 4, 5>(), tile_dot_bf16<3, 4, 5>();
    }
  }
  tile_store<0>(out, 64);
  release_tiles();
  return op.rounds * 4 * 16 * 16 * (op.kind == 2 ? 64 : 32);
}
#endif

inline int64_t peak_of(const PeakOp& op, const Context& context) {
  std::byte* out = context.scratch;
  const std::byte* data = op.data;
  if (op.kind == 0) {
    const F32x16 a = load(reinterpret_cast<const float*>(data));
    const auto next = [&](F32x16 y, int, int64_t) { return fma(a, a, y); };
    return peak_rounds<kPeakSums, F32x16>(op.rounds, data, out, next) * kLanes;
  }
  if (op.kind == 3) {
    const Range mine = share(op.bytes / 256, context);
    F32x16 totals[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const auto* x = reinterpret_cast<const float*>(data + i * 256);
      QUIRE_UNROLL for (int k = 0; k < 4; ++k) {
        prefetch_l1(reinterpret_cast<const std::byte*>(x + k * kLanes) + 4096);
        totals[k] = totals[k] + load(x + k * kLanes);
      }
    }
    memcpy(out, totals, sizeof totals);
    return (mine.end - mine.begin) * 256;
  }
#if defined(QUIRE_TILES)
  return peak_of_tiles(op, out);
#else
  if (op.kind == 1) {
    const Pairs a = load_pairs(data);
    const BroadcastPair b = broadcast_pair(data);
    const auto next = [&](F32x16 y, int, int64_t) { return dot2(a, b, y); };
    return peak_rounds<kPeakSums, F32x16>(op.rounds, data, out, next) * kLanes * 2;
  }
  PeakDots::Weights weights[kPeakWeights];
  QUIRE_UNROLL for (int i = 0; i < kPeakWeights; ++i) {
    weights[i] = PeakDots::load(reinterpret_cast<const uint8_t*>(data) + i * 64);
  }
  const auto next = [&](PeakDots::Sums y, int i, int64_t round) {
    const auto* x = reinterpret_cast<const int8_t*>(data) + round % 8 * 64;
    return PeakDots::add(y, weights[i % kPeakWeights], x + i / kPeakWeights * PeakDots::kInputs);
  };
  return peak_rounds<kPeakDots, PeakDots::Sums>(op.rounds, data, out, next) * kLanes * PeakDots::kInputs;
#endif
}

inline void peak(const PeakOp& op, const Context& context) { op.operations[context.thread] = peak_of(op, context); }

QUIRE_OP(peak, PeakOp, kind, rounds, data, bytes, operations)

}  // namespace
}  // namespace quire
