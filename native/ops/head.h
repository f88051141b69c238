// The head of a step in which every row wants the likeliest token: logits are compared, not written.
#pragma once
#include "ops/gemm.h"

namespace quire {
namespace {

inline void head(const HeadOp& op, const Context& context) {
  constexpr int64_t kWidth = kPanelTiles * kTile;
  const int64_t num_rows = context.step->num_logit_rows, num_outputs = op.weight.num_outputs;
  float* values = op.best_values + context.thread * op.max_rows;
  int32_t* ids = op.best_ids + context.thread * op.max_rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    values[r] = -__builtin_inff();
    ids[r] = -1;
  }
  float* scratch = reinterpret_cast<float*>(context.scratch);
  const Range mine = share((num_outputs + kWidth - 1) / kWidth, context);
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    const int64_t column = panel * kWidth, left = num_outputs - column, count = left < kWidth ? left : kWidth;
    for (int64_t first = 0; first < num_rows; first += kPanelRows) {
      const int64_t some = num_rows - first < kPanelRows ? num_rows - first : kPanelRows;
      multiply(op.weight, op.x, first, some, column / kTile, (count + kTile - 1) / kTile, scratch, kWidth);
      for (int64_t r = 0; r < some; ++r) {
        float* logits = scratch + r * kWidth;
        add_bias(op.bias, column, count, logits);
        for (int64_t i = 0; i < count; ++i) {
          // A NaN wins and stays: nothing is larger than it.
          if (logits[i] > values[first + r] || logits[i] != logits[i]) {
            values[first + r] = logits[i];
            ids[first + r] = static_cast<int32_t>(column + i);
          }
        }
      }
    }
  }
}

// Threads own ascending ranges of ids, so that of equal values the first thread's is the lowest id.
inline void argmax(const ArgmaxOp& op, const Context& context) {
  if (context.thread != 0) return;
  for (int64_t r = 0; r < context.step->num_logit_rows; ++r) {
    float best = -__builtin_inff();
    int32_t id = -1;
    for (int64_t thread = 0; thread < context.num_threads; ++thread) {
      const float value = op.best_values[thread * op.max_rows + r];
      if (value > best || value != value) {
        best = value;
        id = op.best_ids[thread * op.max_rows + r];
      }
    }
    op.token_ids[r] = best - best == 0.0f ? id : -1;
  }
}

}  // namespace
}  // namespace quire
