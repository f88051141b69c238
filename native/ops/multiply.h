// The product of two rows, value by value.
#pragma once
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// out = a * b.
struct MultiplyOp {
  Rows a;  // f32
  Rows b;  // f32
  Rows out;
  int64_t width;
  bool of_logit_rows;
};

namespace {

inline void multiply(const MultiplyOp& op, const Context& context) {
  write_chunks(op.out, num_rows(context, op.of_logit_rows), op.width, context,
               [&](int64_t t, int64_t first, int64_t columns, float* values) {
                 const float *a = row<float>(op.a, t) + first, *b = row<float>(op.b, t) + first;
                 for (int64_t i = 0; i < columns; ++i) values[i] = a[i] * b[i];
               });
}

QUIRE_OP(multiply, MultiplyOp, a, b, out, width, of_logit_rows)

}  // namespace
}  // namespace quire
