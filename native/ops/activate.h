// Elementwise functions, and changes of a row's type.
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = activation(x), or activation(x[:F]) * x[F:] if gated; `none` just changes the type. width: of out.
struct ActivateOp {
  Rows x;  // f32
  Rows out;
  int64_t width;
  Activation activation;
  bool gated;
  bool of_logit_rows;
  bool from_logit_rows;  // row s of out is row logit_rows[s] of x
};

namespace {

inline void activate(const ActivateOp& op, const Context& context) {
  const int32_t* logit_rows = op.from_logit_rows ? context.step->logit_rows : nullptr;
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 const float* x = row<float>(op.x, logit_rows != nullptr ? logit_rows[t] : t) + first;
                 apply(op.activation, x, op.gated ? x + op.width : nullptr, values, columns);
               });
}

QUIRE_OP(activate, ActivateOp, x, out, width, activation, gated, of_logit_rows, from_logit_rows)

}  // namespace
}  // namespace quire
