// Rows multiplied by the sigmoid of a value of their own, or values by that of theirs.
#pragma once
#include "ops/functions.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = x / (1 + exp(-gate)), one gate per row, or `per_value` one per value.
struct GateRowsOp {
  Rows x;      // f32
  Rows gates;  // f32 [T, 1] or [T, width]
  Rows out;
  int64_t width;
  bool per_value;
  bool of_logit_rows;
};

namespace {

inline void gate_rows(const GateRowsOp& op, const Context& context) {
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 const float* x = row<float>(op.x, t) + first;
                 float divisors[kLanes];
                 if (!op.per_value) {
                   store(divisors, broadcast(1.0f) + exp(zero() - broadcast(*row<float>(op.gates, t))));
                   for (int64_t i = 0; i < columns; ++i) values[i] = x[i] / divisors[0];
                   return;
                 }
                 const float* gates = row<float>(op.gates, t) + first;
                 for (int64_t i = 0; i < columns; i += kLanes) {
                   const int64_t count = columns - i < kLanes ? columns - i : kLanes;
                   float lanes[kLanes] = {};
                   memcpy(lanes, gates + i, static_cast<size_t>(count) * sizeof(float));
                   store(divisors, broadcast(1.0f) + exp(zero() - load(lanes)));
                   for (int64_t lane = 0; lane < count; ++lane) values[i + lane] = x[i + lane] / divisors[lane];
                 }
               });
}

QUIRE_OP(gate_rows, GateRowsOp, x, gates, out, width, per_value, of_logit_rows)

}  // namespace
}  // namespace quire
