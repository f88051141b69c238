// Sums and concatenations over the ranks of a tensor-parallel group, in shared memory (ranks/exchange.h).
//
// Thread t of every rank has the same rows and columns, so that it waits only for the threads t of other ranks. When
// the ranks have given up the ops return at once, and what they leave is anything.
#pragma once
#include <cstring>

#include "isa/simd.h"
#include "plan/op.h"
#include "ranks/exchange.h"

namespace quire {

// out = the sum of x over all ranks, in the order of the ranks: the same bits on every rank. Or out += it.
struct AllReduceOp {
  Rows x;    // f32
  Rows out;  // f32
  int64_t width;
  const Exchange* exchange;
  bool add;
  bool of_logit_rows;
};
// out = the columns of all ranks, in the order of the ranks. `width` of x on each rank; of `out_width` columns the last
// rank may have fewer.
struct AllGatherOp {
  Rows x;    // f32
  Rows out;  // f32
  int64_t width;
  int64_t out_width;
  const Exchange* exchange;
  bool of_logit_rows;
};

namespace {

// [rows, width] values in chunks of columns, the unit that threads share: chunk `index` is in a row from `first` on.
struct Chunks {
  static constexpr int64_t kWidth = 64;
  int64_t width, per_row;

  explicit Chunks(int64_t columns) : width(columns), per_row((columns + kWidth - 1) / kWidth) {}
  int64_t row(int64_t index) const { return index / per_row; }
  int64_t first(int64_t index) const { return index % per_row * kWidth; }
  int64_t columns(int64_t index) const {
    const int64_t left = width - first(index);
    return left < kWidth ? left : kWidth;
  }
};

// Each piece of this thread's chunks: copied into its slot, then read(slots, chunk, place in the slot) for each chunk
// of it, when all ranks have theirs there.
template <typename Read>
void exchange_chunks(const Exchange& ranks, const Rows& x, const Chunks& chunks, int64_t num_rows,
                     const Context& context, Read read) {
  constexpr int64_t kChunksOfPiece = kSlotFloats / Chunks::kWidth;
  const Range mine = share(num_rows * chunks.per_row, context);
  const float* slots[kMostRanks];
  for (int64_t begin = mine.begin; begin < mine.end; begin += kChunksOfPiece) {
    const int64_t end = mine.end - begin < kChunksOfPiece ? mine.end : begin + kChunksOfPiece;
    const uint32_t piece = next_piece(ranks, context.thread);
    auto* to = reinterpret_cast<float*>(slot_of(ranks, ranks.rank, context.thread, piece));
    for (int64_t i = begin; i < end; ++i, to += Chunks::kWidth) {
      const float* from = row<float>(x, chunks.row(i)) + chunks.first(i);
      std::memcpy(to, from, static_cast<size_t>(4 * chunks.columns(i)));
    }
    if (!meet(ranks, context.thread, piece)) return;
    for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
      slots[rank] = reinterpret_cast<const float*>(slot_of(ranks, rank, context.thread, piece));
    }
    for (int64_t i = begin; i < end; ++i) read(slots, i, (i - begin) * Chunks::kWidth);
  }
}

inline void all_reduce(const AllReduceOp& op, const Context& context) {
  const Exchange& ranks = *op.exchange;
  const Chunks chunks(op.width);
  const auto sum = [&](const float* const* slots, int64_t chunk, int64_t at) {
    float* out = row<float>(op.out, chunks.row(chunk)) + chunks.first(chunk);
    const int64_t count = chunks.columns(chunk);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      F32x16 total = load(slots[0] + at + i);
      for (int64_t rank = 1; rank < ranks.num_ranks; ++rank) total = total + load(slots[rank] + at + i);
      store(out + i, op.add ? load(out + i) + total : total);
    }
    for (; i < count; ++i) {
      float total = slots[0][at + i];
      for (int64_t rank = 1; rank < ranks.num_ranks; ++rank) total += slots[rank][at + i];
      out[i] = op.add ? out[i] + total : total;
    }
  };
  exchange_chunks(ranks, op.x, chunks, num_rows(context, op.of_logit_rows), context, sum);
}

inline void all_gather(const AllGatherOp& op, const Context& context) {
  const Exchange& ranks = *op.exchange;
  const Chunks chunks(op.width);
  const auto copy = [&](const float* const* slots, int64_t chunk, int64_t at) {
    float* out = row<float>(op.out, chunks.row(chunk));
    for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
      const int64_t first = rank * op.width + chunks.first(chunk), left = op.out_width - first;
      const int64_t count = left < chunks.columns(chunk) ? left : chunks.columns(chunk);
      if (count > 0) std::memcpy(out + first, slots[rank] + at, static_cast<size_t>(4 * count));
    }
  };
  exchange_chunks(ranks, op.x, chunks, num_rows(context, op.of_logit_rows), context, copy);
}

QUIRE_OP(all_reduce, AllReduceOp, x, out, width, exchange, add, of_logit_rows)
QUIRE_OP(all_gather, AllGatherOp, x, out, width, out_width, exchange, of_logit_rows)

}  // namespace
}  // namespace quire
