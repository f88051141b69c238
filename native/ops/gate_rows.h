// Rows multiplied by the sigmoid of a value of their own.
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = x / (1 + exp(-gate)), one gate per row.
struct GateRowsOp {
  Rows x;      // f32
  Rows gates;  // f32 [T, 1]
  Rows out;
  int64_t width;
  bool of_logit_rows;
};

namespace {

inline void gate_rows(const GateRowsOp& op, const Context& context) {
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 const float* x = row<float>(op.x, t) + first;
                 float divisors[kLanes];
                 store(divisors, broadcast(1.0f) + exp(zero() - broadcast(*row<float>(op.gates, t))));
                 for (int64_t i = 0; i < columns; ++i) values[i] = x[i] / divisors[0];
               });
}

QUIRE_OP(gate_rows, GateRowsOp, x, gates, out, width, of_logit_rows)

}  // namespace
}  // namespace quire
