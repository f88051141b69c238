// The head of a step in which every row wants the likeliest token: logits are compared, not written.
#pragma once
#include "ops/gemm.h"
#include "ops/soft_cap.h"
#include "ranks/exchange.h"

namespace quire {

// The largest logit of each of the S rows without writing logits: per thread, then merged by `ArgmaxOp`. A row without
// a largest finite value (NaN, +inf, all -inf) gets id -1; of equal values the lowest id wins. Logits are capped before
// they are compared if `soft_cap` is above 0: different ones may become equal.
struct HeadOp {
  Weight weight;
  const float* bias;
  Rows x;
  float* best_values;  // [threads, max rows]
  int32_t* best_ids;
  int64_t max_rows;
  float soft_cap;
  int64_t num_padding;  // outputs at the end of the weight that are no tokens
};
struct ArgmaxOp {
  const float* best_values;
  const int32_t* best_ids;
  int64_t max_rows;
  int32_t* token_ids;        // [S]
  const Exchange* exchange;  // null, or the ranks that share the rows of the head
  int64_t first_id;          // of this rank's rows
};

namespace {

// Keeps the largest of `logits` and its column. A NaN wins and stays: nothing is larger than it.
inline void keep_largest(const float* logits, int64_t column, int64_t count, float* best, int32_t* id) {
  for (int64_t i = 0; i < count; ++i) {
    if (logits[i] > *best || logits[i] != logits[i]) {
      *best = logits[i];
      *id = static_cast<int32_t>(column + i);
    }
  }
}

inline void head(const HeadOp& op, const Context& context) {
  const int64_t num_rows = context.step->num_logit_rows, num_outputs = op.weight.num_outputs - op.num_padding;
  float* values = op.best_values + context.thread * op.max_rows;
  int32_t* ids = op.best_ids + context.thread * op.max_rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    values[r] = -__builtin_inff();
    ids[r] = -1;
  }
  float* scratch = reinterpret_cast<float*>(context.scratch);
  const Pieces pieces(num_rows, num_outputs, context.num_threads, dequantises(op.weight, op.x));
  const Range mine = share(pieces.count, context);
  const TileSession session(op.x.type);
  KvFetch fetch;
  for (int64_t piece = mine.begin; piece < mine.end; ++piece) {
    const int64_t column = pieces.column(piece), count = pieces.columns(piece);
    const Range rows = pieces.rows(piece);
    multiply(op.weight, op.x, rows.begin, rows.end - rows.begin, column / kTile, (count + kTile - 1) / kTile, fetch,
             scratch, kPanelWidth);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      float* logits = scratch + (r - rows.begin) * kPanelWidth;
      if (op.bias != nullptr) add_values(op.bias + column, count, logits);
      if (op.soft_cap > 0.0f) cap_values(logits, kPanelWidth, op.soft_cap);
      // All 32 at once, since a new largest is rare: columns past the last only cause a look at the others.
      const bool news = any_above(load(logits), values[r]) || any_above(load(logits + kTile), values[r]);
      if (news) keep_largest(logits, column, count, &values[r], &ids[r]);
    }
  }
}

// A row's largest logit and its id.
struct Best {
  float value;
  int32_t id;

  // Those given first win where values are equal.
  void take(float other, int32_t other_id) {
    if (other > value || other != other) {
      value = other;
      id = other_id;
    }
  }
  int32_t chosen() const { return value - value == 0.0f ? id : -1; }
};

inline Best best_of_threads(const ArgmaxOp& op, int64_t r, int64_t num_threads) {
  Best best{-__builtin_inff(), -1};
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    best.take(op.best_values[thread * op.max_rows + r], op.best_ids[thread * op.max_rows + r]);
  }
  return best;
}

// The best of all ranks, whose ids ascend with the ranks.
inline void argmax_of_ranks(const ArgmaxOp& op, const Context& context) {
  constexpr int64_t kMost = kSlotBytes / static_cast<int64_t>(sizeof(Best));
  const Exchange& ranks = *op.exchange;
  const int64_t num_rows = context.step->num_logit_rows;
  for (int64_t begin = 0; begin < num_rows; begin += kMost) {
    const int64_t end = num_rows - begin < kMost ? num_rows : begin + kMost;
    const uint32_t piece = next_piece(ranks, 0);
    auto* mine = reinterpret_cast<Best*>(slot_of(ranks, ranks.rank, 0, piece));
    for (int64_t r = begin; r < end; ++r) {
      Best best = best_of_threads(op, r, context.num_threads);
      if (best.id >= 0) best.id += static_cast<int32_t>(op.first_id);
      mine[r - begin] = best;
    }
    if (!meet(ranks, 0, piece, (end - begin) * static_cast<int64_t>(sizeof(Best)))) return;
    for (int64_t r = begin; r < end; ++r) {
      Best best{-__builtin_inff(), -1};
      for (int64_t rank = 0; rank < ranks.num_ranks; ++rank) {
        const Best& other = reinterpret_cast<const Best*>(slot_of(ranks, rank, 0, piece))[r - begin];
        best.take(other.value, other.id);
      }
      op.token_ids[r] = best.chosen();
    }
  }
}

// Of each row a thread owns an ascending range of ids, so that of equal values the first thread's is the lowest id.
inline void argmax(const ArgmaxOp& op, const Context& context) {
  if (context.thread != 0) return;
  if (op.exchange != nullptr) return argmax_of_ranks(op, context);
  for (int64_t r = 0; r < context.step->num_logit_rows; ++r) {
    op.token_ids[r] = best_of_threads(op, r, context.num_threads).chosen();
  }
}

QUIRE_OP(head, HeadOp, weight, bias, x, best_values, best_ids, max_rows, soft_cap, num_padding)
QUIRE_OP(argmax, ArgmaxOp, best_values, best_ids, max_rows, token_ids, exchange, first_id)

}  // namespace
}  // namespace quire
