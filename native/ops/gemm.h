// Linear layers: how a product is shared between threads, and what happens to a result before it is written.
// The products themselves: gemm_q.h for quantised weights, gemm_float.h for the others.
//
// y[n] of one row is computed by one thread in one order whatever the number of rows:
//   f32, f16   y = fma(x[i], w[i], y) for i = 0, 1, …
//   bf16       per pair of inputs y = fma(x[2j+1], w[2j+1], y), then y = fma(x[2j], w[2j], y): VDPBF16PS's order;
//              on AMX, and only there, another one (gemm_amx.h)
//   4 to 8 bit with bf16 rows, on AMX: see gemm_amx.h
//   q4, q4m, q5, q5m, q8  per block of 32 the exact integer dot product p = sum(q * (u - centre)), then
//              y = fma(float(p), d * scale, y), and for q4m and q5m then y = fma(m, scaled_sum, y)
//   q4k, q5k   as q4m with d = d' * s and m = 0 - e * n, rounded to fp32 (types.h; there d' is d)
//   q6k        per half block of 16, p being the sum of its products, y = fma(float(p), (d' * s) * scale, y)
#pragma once
#include "ops/functions.h"
#include "ops/gemm_float.h"
#include "ops/gemm_q.h"
#include "ops/lora.h"
#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// y = x @ weight.T + bias, then `activation`. gated: N = 2 F, out[t, f] = activation(y[t, f]) * y[t, F + f], F being
// a multiple of 16.
// add: out[t, n] += y (f32 rows). Rows x are as the weight's format wants; rows out may be of any type, q8 wanting
// a multiple of 32 columns. What `ahead` says may be fetched meanwhile. `lora`: null, or the adapters of the rows.
struct GemmOp {
  Weight weight;
  const float* bias;  // [N] or null
  Rows x;
  Rows out;
  Activation activation;
  bool gated;
  bool add;
  bool of_logit_rows;  // S rows instead of T
  KvAhead ahead;
  const LoraSite* lora;
};

namespace {

constexpr int64_t kPanelTiles = 2;  // 32 outputs: one int8 block
constexpr int64_t kPanelWidth = kPanelTiles * kTile;
constexpr int64_t kPanelRows = 64;  // at most, so that a panel's results stay in L1
constexpr int64_t kMostPieceRows = 512;

// Whether a product dequantises its weights (gemm_amx.h).
inline bool dequantises(const Weight& weight, const Rows& x) {
  return wanted_rows(weight.format) == RowType::q8 && x.type == RowType::bf16;
}

// `multiply` with tiles of one matrix.
inline void multiply_part(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                          int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
#if defined(QUIRE_TILES)
  if (dequantises(weight, x)) {
    return multiply_tiles(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
  }
#endif
  if (wanted_rows(weight.format) == RowType::q8) {
    multiply_q(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
  } else {
    multiply_float(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
  }
}

// y of rows first … first + num_rows - 1 and of num_tiles tiles of 16 outputs from `tile` on, to out[row][16 * tiles].
inline void multiply(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                     int64_t num_tiles, KvFetch& fetch, float* out, int64_t out_stride) {
  if (const int64_t own = weight.own_outputs() / kTile; weight.next != nullptr && tile + num_tiles > own) {
    const int64_t here = tile < own ? own - tile : 0;
    if (here > 0) multiply_part(weight, x, first, num_rows, tile, here, fetch, out, out_stride);
    return multiply(*weight.next, x, first, num_rows, tile + here - own, num_tiles - here, fetch, out + here * kTile,
                    out_stride);
  }
  multiply_part(weight, x, first, num_rows, tile, num_tiles, fetch, out, out_stride);
}

// A product is cut into panels of 32 outputs and these into blocks of rows. A thread's share are consecutive pieces.
// With few rows they go panel by panel: a thread streams its own weights, and shares at most two panels with others.
// With many they go block of rows by block of rows, each of which stays in L2 for all of its panels, and the next op of
// this thread finds most of its rows there.
struct Pieces {
  int64_t num_rows, row_blocks, num_outputs;
  int64_t panels, count;
  bool by_rows;

  // `dequantises`: each piece dequantises its weights.
  Pieces(int64_t rows, int64_t outputs, int64_t num_threads, bool dequantises)
      : num_rows(rows), num_outputs(outputs), panels((outputs + kPanelWidth - 1) / kPanelWidth) {
    // Eight pieces for each thread, so that none has an eighth more than another; but rows share a panel's weights.
    const int64_t fewest = 8 * num_threads;
    by_rows = dequantises || (rows >= 2 * kPanelRows && panels * (rows / kPanelRows) >= fewest);
    const int64_t lowest = by_rows ? kPanelRows : 4;
    int64_t height = dequantises ? kMostPieceRows / 2 : kPanelRows;
    while (height > lowest && panels * blocks_of(height) < fewest) height /= 2;
    row_blocks = blocks_of(height);
    count = rows == 0 ? 0 : panels * row_blocks;
  }
  // Of at most `height` rows; where blocks come first, of at least as many, as far as there are.
  int64_t blocks_of(int64_t height) const {
    if (by_rows) return num_rows < height ? 1 : num_rows / height;
    return (num_rows + height - 1) / height;
  }
  int64_t column(int64_t piece) const { return (by_rows ? piece % panels : piece / row_blocks) * kPanelWidth; }
  int64_t columns(int64_t piece) const {
    const int64_t left = num_outputs - column(piece);
    return left < kPanelWidth ? left : kPanelWidth;
  }
  Range rows(int64_t piece) const {
    const int64_t block = by_rows ? piece / panels : piece % row_blocks;
    return {num_rows * block / row_blocks, num_rows * (block + 1) / row_blocks};
  }
};

// Where a piece will be written: other threads have read these lines, and taking them back while the product is
// computed makes steps 1 to 5 % shorter (Zen 5, 2 threads).
inline void fetch_to_write(const Rows& out, Range rows, int64_t column, int64_t count) {
  const int64_t first = bytes_of_columns(out.type, column), end = bytes_of_columns(out.type, column + count);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const std::byte* p = row<std::byte>(out, r);
    for (int64_t i = first; i < end; i += 64) prefetch_to_write(p + i);
    prefetch_to_write(p + end - 1);
  }
}

// One piece of a GemmOp: at most kMostPieceRows rows by 32 outputs (64 products if gated), from product to written
// result.
inline void gemm_piece(const GemmOp& op, Range rows, int64_t column, int64_t count, int64_t num_outputs, KvFetch& fetch,
                       float* scratch) {
  const int64_t num_tiles = (count + kTile - 1) / kTile, num_rows = rows.end - rows.begin;
  float* factors = scratch + kMostPieceRows * kPanelWidth;
  fetch_to_write(op.out, rows, column, count);
  fetch_lora(op.lora, column / kTile, num_tiles);
  if (op.gated) fetch_lora(op.lora, (num_outputs + column) / kTile, num_tiles);
  const bool is_plain = !op.gated && !op.add && op.bias == nullptr && op.activation == Activation::none;
  if (is_plain && op.out.type == RowType::f32 && count == kPanelWidth && op.out.stride_bytes % 4 == 0) {
    float* out = row<float>(op.out, rows.begin) + column;
    multiply(op.weight, op.x, rows.begin, num_rows, column / kTile, num_tiles, fetch, out, op.out.stride_bytes / 4);
    return add_lora(op.lora, rows.begin, num_rows, column / kTile, num_tiles, out, op.out.stride_bytes / 4);
  }
  multiply(op.weight, op.x, rows.begin, num_rows, column / kTile, num_tiles, fetch, scratch, kPanelWidth);
  add_lora(op.lora, rows.begin, num_rows, column / kTile, num_tiles, scratch, kPanelWidth);
  if (op.gated) {
    const int64_t tile = (num_outputs + column) / kTile;
    multiply(op.weight, op.x, rows.begin, num_rows, tile, num_tiles, fetch, factors, kPanelWidth);
    add_lora(op.lora, rows.begin, num_rows, tile, num_tiles, factors, kPanelWidth);
  }
  for (int64_t r = 0; r < num_rows && op.bias != nullptr; ++r) {
    add_values(op.bias + column, count, scratch + r * kPanelWidth);
    if (op.gated) add_values(op.bias + num_outputs + column, count, factors + r * kPanelWidth);
  }
  // All rows at once, with the columns past the last.
  if (op.gated || op.activation != Activation::none) {
    apply(op.activation, scratch, op.gated ? factors : nullptr, scratch, num_rows * kPanelWidth);
  }
  if (op.out.type == RowType::q8) {
    std::byte* blocks = row<std::byte>(op.out, rows.begin) + bytes_of_columns(RowType::q8, column);
    return quantise(scratch, num_rows, blocks, op.out.stride_bytes);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* values = scratch + r * kPanelWidth;
    if (op.add) {
      add_values(values, count, row<float>(op.out, rows.begin + r) + column);
    } else {
      write_columns(op.out, rows.begin + r, column, count, values);
      if (column + count == num_outputs) finish_row(op.out, rows.begin + r, num_outputs);
    }
  }
}

inline void gemm(const GemmOp& op, const Context& context) {
  const int64_t count = num_rows(context, op.of_logit_rows);
  const TileSession session(op.x.type);
  KvFetch fetch(op.ahead, context);
  const auto multiply_columns = [&](int64_t first, int64_t width, int64_t num_outputs) {
    const Pieces pieces(count, width, context.num_threads, dequantises(op.weight, op.x));
    const Range mine = share(pieces.count, context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      gemm_piece(op, pieces.rows(i), first + pieces.column(i), pieces.columns(i), num_outputs, fetch,
                 reinterpret_cast<float*>(context.scratch));
    }
  };
  const int64_t num_outputs = op.weight.num_outputs;
  if (op.gated) return multiply_columns(0, num_outputs / 2, num_outputs / 2);
  // Threads share each part of a stack evenly, since formats take different times.
  for (const Weight* part = &op.weight; part != nullptr; part = part->next) {
    multiply_columns(num_outputs - part->num_outputs, part->own_outputs(), num_outputs);
  }
}

QUIRE_OP(gemm, GemmOp, weight, bias, x, out, activation, gated, add, of_logit_rows, ahead, lora)

}  // namespace
}  // namespace quire
