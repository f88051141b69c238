// Rows times a constant, as the multipliers of embeddings, residuals and logits, or times a parameter of one value.
#pragma once
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = factor * x, or times *by if that is not null.
struct ScaleOp {
  Rows x;  // f32
  Rows out;
  int64_t width;
  float factor;
  const float* by;
  bool of_logit_rows;
};

namespace {

inline void scale(const ScaleOp& op, const Context& context) {
  const float factor = op.by == nullptr ? op.factor : op.factor * *op.by;
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 const float* x = row<float>(op.x, t) + first;
                 for (int64_t i = 0; i < columns; ++i) values[i] = factor * x[i];
               });
}

QUIRE_OP(scale, ScaleOp, x, out, width, factor, by, of_logit_rows)

}  // namespace
}  // namespace quire
