// The sum of two rows.
#pragma once
#include "plan/op.h"

namespace quire {

// out = a + b, f32.
struct AddOp {
  Rows a;
  Rows b;
  Rows out;
  int64_t width;
  bool of_logit_rows;
};

namespace {

inline void add(const AddOp& op, const Context& context) {
  const Range mine = share(num_rows(context, op.of_logit_rows), context);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float *a = row<float>(op.a, t), *b = row<float>(op.b, t);
    float* out = row<float>(op.out, t);
    for (int64_t i = 0; i < op.width; ++i) out[i] = a[i] + b[i];
  }
}

QUIRE_OP(add, AddOp, a, b, out, width, of_logit_rows)

}  // namespace
}  // namespace quire
