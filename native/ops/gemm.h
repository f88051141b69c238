// Linear layers: how a product is shared between threads, and what happens to a result before it is written.
// The products themselves: gemm_q.h for quantised weights, gemm_float.h for the others.
//
// y[n] of one row is computed by one thread in one order whatever the number of rows:
//   f32, f16   y = fma(x[i], w[i], y) for i = 0, 1, …
//   bf16       per pair of inputs y = fma(x[2j+1], w[2j+1], y), then y = fma(x[2j], w[2j], y): VDPBF16PS's order
//   q4, q4m, q8  per block of 32 the exact integer dot product p = sum(q * (u - centre)), then
//              y = fma(float(p), d * scale, y), and for q4m then y = fma(m, scaled_sum, y)
#pragma once
#include "ops/functions.h"
#include "ops/gemm_float.h"
#include "ops/gemm_q.h"
#include "ops/rows.h"
#include "plan/ops.h"

namespace quire {
namespace {

constexpr int64_t kPanelRows = 64;   // rows of x that stay in cache while a tile is multiplied with them
constexpr int64_t kPanelTiles = 2;   // 32 outputs: one int8 block

// y of rows first … first + num_rows - 1 and of num_tiles tiles of 16 outputs from `tile` on, to out[row][16 * tiles].
inline void multiply(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                     int64_t num_tiles, float* out, int64_t out_stride) {
  if (wanted_rows(weight.format) == RowType::q8) {
    multiply_q(weight, x, first, num_rows, tile, num_tiles, out, out_stride);
  } else {
    multiply_float(weight, x, first, num_rows, tile, num_tiles, out, out_stride);
  }
}

inline void add_bias(const float* bias, int64_t first, int64_t count, float* values) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < count; ++i) values[i] += bias[first + i];
}

// One panel: a few rows by 32 outputs (64 products if gated), from product to written result.
inline void gemm_panel(const GemmOp& op, int64_t first, int64_t num_rows, int64_t column, float* scratch) {
  constexpr int64_t kWidth = kPanelTiles * kTile;
  const int64_t num_outputs = op.gated ? op.weight.num_outputs / 2 : op.weight.num_outputs;
  const int64_t left = num_outputs - column, count = left < kWidth ? left : kWidth;
  const int64_t num_tiles = (count + kTile - 1) / kTile;
  float* factors = scratch + kPanelRows * kWidth;
  multiply(op.weight, op.x, first, num_rows, column / kTile, num_tiles, scratch, kWidth);
  if (op.gated) {
    multiply(op.weight, op.x, first, num_rows, (num_outputs + column) / kTile, num_tiles, factors, kWidth);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* values = scratch + r * kWidth;
    add_bias(op.bias, column, count, values);
    if (op.gated) add_bias(op.bias, num_outputs + column, count, factors + r * kWidth);
    if (op.gated || op.activation != Activation::none) {
      apply(op.activation, values, op.gated ? factors + r * kWidth : nullptr, values, count);
    }
    if (op.add) {
      float* out = row<float>(op.out, first + r) + column;
      for (int64_t i = 0; i < count; ++i) out[i] += values[i];
    } else {
      write_columns(op.out, first + r, column, count, values);
      if (column + count == num_outputs) finish_row(op.out, first + r, num_outputs);
    }
  }
}

inline void gemm(const GemmOp& op, const Context& context) {
  constexpr int64_t kWidth = kPanelTiles * kTile;
  const int64_t num_rows = op.of_logit_rows ? context.step->num_logit_rows : context.step->num_tokens;
  const int64_t num_outputs = op.gated ? op.weight.num_outputs / 2 : op.weight.num_outputs;
  const Range mine = share((num_outputs + kWidth - 1) / kWidth, context);
  for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
    for (int64_t first = 0; first < num_rows; first += kPanelRows) {
      const int64_t left = num_rows - first;
      gemm_panel(op, first, left < kPanelRows ? left : kPanelRows, panel * kWidth,
                 reinterpret_cast<float*>(context.scratch));
    }
  }
}

}  // namespace
}  // namespace quire
