// Elementwise functions, the sum of two rows, and changes of a row's type.
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/ops.h"

namespace quire {
namespace {

inline void activate(const ActivateOp& op, const Context& context) {
  const Step& step = *context.step;
  const int64_t count = op.of_logit_rows ? step.num_logit_rows : step.num_tokens;
  constexpr int64_t kChunk = 256;  // columns per work item: one decode's row is shared by all threads
  const int64_t chunks = (op.width + kChunk - 1) / kChunk;
  const Range mine = share(count * chunks, context);
  float values[kChunk];
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t t = item / chunks, first = item % chunks * kChunk;
    const int64_t columns = op.width - first < kChunk ? op.width - first : kChunk;
    const float* in = row<float>(op.in, op.from_logit_rows ? step.logit_rows[t] : t) + first;
    apply(op.activation, in, op.gated ? in + op.width : nullptr, values, columns);
    write_columns(op.out, t, first, columns, values);
    if (first + columns == op.width) finish_row(op.out, t, op.width);
  }
}

inline void add(const AddOp& op, const Context& context) {
  const Range mine = share(context.step->num_tokens, context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float *a = row<float>(op.a, t), *b = row<float>(op.b, t);
    float* out = row<float>(op.out, t);
    for (int64_t i = 0; i < op.width; ++i) out[i] = a[i] + b[i];
  }
}

}  // namespace
}  // namespace quire
