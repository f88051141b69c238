// Sums and concatenations over the ranks of a tensor-parallel group, in shared memory (ranks/exchange.h).
//
// Thread t of every rank has the same rows and columns, so that it waits only for the threads t of other ranks. When
// the ranks have given up the ops return at once, and what they leave is anything.
#pragma once
#include <cstring>

#include "isa/simd.h"
#include "ops/rows.h"
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
// RMS norm of vectors that the ranks hold in parts of equal width: out = x * rsqrt(the mean of all parts' means of
// squares + epsilon) * weight.
struct SharedNormOp {
  Rows x;    // f32
  Rows out;  // any type
  const float* weight;
  int64_t width;  // of this rank's part
  float epsilon;
  const Exchange* exchange;
  bool of_logit_rows;
};

namespace {

// Part of a row of [rows, width] values: `count` columns from `first` on; `at` is its place in the slots.
struct RowPart {
  int64_t row, first, count, at;
};

// Units of 16 columns, which threads share, as parts of rows: visit(part) for those from `begin` to `end`.
template <typename Visit>
void for_parts(int64_t begin, int64_t end, int64_t width, Visit visit) {
  const int64_t per_row = (width + kLanes - 1) / kLanes;
  RowPart part{begin / per_row, begin % per_row * kLanes, 0, 0};
  for (int64_t left = end - begin; left > 0; ++part.row, part.first = 0) {
    const int64_t units = left < per_row - part.first / kLanes ? left : per_row - part.first / kLanes;
    const int64_t columns = width - part.first;
    part.count = columns < units * kLanes ? columns : units * kLanes;
    visit(part);
    part.at += units * kLanes;
    left -= units;
  }
}

// Each piece of this thread's share of x: copied into its slot, then read(slots, part) for each part of it, when all
// ranks have theirs there. Slots have no gaps but the ends of rows that are no whole vector.
template <typename Read>
void exchange_rows(const Exchange& ranks, const Rows& x, int64_t width, int64_t num_rows, const Context& context,
                   Read read) {
  constexpr int64_t kUnitsOfPiece = kSlotFloats / kLanes;
  const Range mine = share(num_rows * ((width + kLanes - 1) / kLanes), context);
  const float* slots[kMostRanks];
  for (int64_t begin = mine.begin; begin < mine.end; begin += kUnitsOfPiece) {
    const int64_t end = mine.end - begin < kUnitsOfPiece ? mine.end : begin + kUnitsOfPiece;
    const uint32_t piece = next_piece(ranks, context.thread);
    auto* to = reinterpret_cast<float*>(slot_of(ranks, ranks.rank, context.thread, piece));
    int64_t bytes = 0;
    for_parts(begin, end, width, [&](const RowPart& part) {
      std::memcpy(to + part.at, row<float>(x, part.row) + part.first, static_cast<size_t>(4 * part.count));
      bytes += 4 * part.count;
    });
    if (!meet(ranks, context.thread, piece, bytes)) return;
    for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
      slots[rank] = reinterpret_cast<const float*>(slot_of(ranks, rank, context.thread, piece));
    }
    for_parts(begin, end, width, [&](const RowPart& part) { read(slots, part); });
  }
}

// out[i] = the sum of slots[…][i] in the order of the ranks, added to out[i] if kAdd.
template <bool kAdd>
void sum_part(const float* const* slots, int64_t num_ranks, const RowPart& part, float* out) {
  const float *first = slots[0] + part.at, *second = slots[1] + part.at;
  int64_t i = 0;
  for (; i + kLanes <= part.count; i += kLanes) {
    F32x16 total = load(first + i) + load(second + i);
    for (int64_t rank = 2; rank < num_ranks; ++rank) total = total + load(slots[rank] + part.at + i);
    store(out + i, kAdd ? load(out + i) + total : total);
  }
  for (; i < part.count; ++i) {
    float total = first[i] + second[i];
    for (int64_t rank = 2; rank < num_ranks; ++rank) total += slots[rank][part.at + i];
    out[i] = kAdd ? out[i] + total : total;
  }
}

inline float mean_of_squares(const float* x, int64_t width) {
  F32x16 squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float tail[kLanes] = {};
  std::memcpy(tail, x + i, static_cast<size_t>(width - i) * sizeof(float));
  return sum(fma(load(tail), load(tail), squares)) / static_cast<float>(width);
}

// out[i] = x[i] * scale * weight[i]
inline void scale_row(const float* x, const float* weight, float scale, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, load(x + i) * broadcast(scale) * load(weight + i));
  for (; i < width; ++i) out[i] = x[i] * scale * weight[i];
}

inline void all_reduce(const AllReduceOp& op, const Context& context) {
  const int64_t count = num_rows(context, op.of_logit_rows), num_ranks = op.exchange->num_ranks;
  exchange_rows(*op.exchange, op.x, op.width, count, context, [&](const float* const* slots, const RowPart& part) {
    float* out = row<float>(op.out, part.row) + part.first;
    op.add ? sum_part<true>(slots, num_ranks, part, out) : sum_part<false>(slots, num_ranks, part, out);
  });
}

inline void all_gather(const AllGatherOp& op, const Context& context) {
  const int64_t count = num_rows(context, op.of_logit_rows), num_ranks = op.exchange->num_ranks;
  exchange_rows(*op.exchange, op.x, op.width, count, context, [&](const float* const* slots, const RowPart& part) {
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const int64_t first = rank * op.width + part.first, left = op.out_width - first;
      const int64_t columns = left < part.count ? left : part.count;
      float* out = row<float>(op.out, part.row) + first;
      if (columns > 0) std::memcpy(out, slots[rank] + part.at, static_cast<size_t>(4 * columns));
    }
  });
}

inline void shared_norm(const SharedNormOp& op, const Context& context) {
  const Exchange& ranks = *op.exchange;
  const Range mine = share(num_rows(context, op.of_logit_rows), context);
  float* values = reinterpret_cast<float*>(context.scratch);
  for (int64_t begin = mine.begin; begin < mine.end; begin += kSlotFloats) {
    const int64_t end = mine.end - begin < kSlotFloats ? mine.end : begin + kSlotFloats;
    const uint32_t piece = next_piece(ranks, context.thread);
    auto* means = reinterpret_cast<float*>(slot_of(ranks, ranks.rank, context.thread, piece));
    for (int64_t t = begin; t < end; ++t) {
      means[t - begin] = mean_of_squares(row<float>(op.x, t), op.width);
    }
    if (!meet(ranks, context.thread, piece, 4 * (end - begin))) return;
    for (int64_t t = begin; t < end; ++t) {
      float total = 0.0f;
      for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
        total += reinterpret_cast<const float*>(slot_of(ranks, rank, context.thread, piece))[t - begin];
      }
      const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(ranks.num_ranks) + op.epsilon);
      scale_row(row<float>(op.x, t), op.weight, scale, op.width, values);
      write_columns(op.out, t, 0, op.width, values);
      finish_row(op.out, t, op.width);
    }
  }
}

QUIRE_OP(all_reduce, AllReduceOp, x, out, width, exchange, add, of_logit_rows)
QUIRE_OP(all_gather, AllGatherOp, x, out, width, out_width, exchange, of_logit_rows)
QUIRE_OP(shared_norm, SharedNormOp, x, out, weight, width, epsilon, exchange, of_logit_rows)

}  // namespace
}  // namespace quire
