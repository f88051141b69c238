// The products of a mixture of experts: each expert's on the rows that chose it, with the kernels of gemm.h. Weights of
// other experts are not read.
//
// Experts stand one below the other in a weight and are visited in ascending order, so that a token's sum has one order
// whatever the other tokens chose. A product's rows are at most kPanelRows tokens of one expert.
#pragma once
#include "ops/gemm.h"
#include "ops/route.h"

namespace quire {

// out[i, f] = activation(g[f]) * u[f] for row i of `routed`, g and u being F outputs each of the row's expert, whose
// outputs are rows 2 F e … 2 F (e + 1) - 1 of the weight: first all g. With a limit L, gates are instead
// g' / (1 + exp(-alpha * g')) * (u' + 1), g' = min(g, L) and u' = min(max(u, -L), L).
struct ExpertUpOp {
  Weight weight;      // [X * 2 F, E]
  const float* bias;  // [X * 2 F] or null
  Rows x;             // [T, E], as the weight wants
  Rows out;           // [T * top_k, F]
  const RoutedRow* routed;
  const int32_t* counts;
  int64_t num_experts;
  Activation activation;
  float alpha;
  float limit;  // 0: none
  Weight down;  // that of the ExpertDownOp behind it, which is fetched with this one; or zeros
};

// out[t] = the sum over the rows i of token t of weight_i * (x[i] @ weight_e.T), or with `add` out[t] plus that; e, the
// row's expert, has rows E e … E (e + 1) - 1 of the weight.
struct ExpertDownOp {
  Weight weight;      // [X * E, F]
  const float* bias;  // [X * E] or null: added to each product
  Rows x;             // [T * top_k, F], as the weight wants
  Rows out;           // f32 [T, E]
  const RoutedRow* routed;
  const int32_t* counts;
  int64_t num_experts;
  bool add;
};

namespace {

constexpr int64_t kGatheredBytes = 1 << 19;  // of a thread's scratch
constexpr int64_t kUnalignedWidth = 2 * kPanelWidth;
constexpr int64_t kRowsOfWeights = 4;  // reading a panel's weights takes about as long as four rows of products

// Calls visit(expert, first, count) for consecutive rows of `routed` that one expert computes, at most `most`.
template <typename Visit>
inline void visit_blocks(const int32_t* counts, int64_t num_experts, int64_t most, Visit visit) {
  int64_t first = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = counts[e], blocks = (count + most - 1) / most;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = count * b / blocks, end = count * (b + 1) / blocks;
      visit(e, first + begin, end - begin);
    }
    first += count;
  }
}

// y, and the bias if there is one, of outputs first_output … first_output + count - 1 of a weight, at most a panel, for
// num_rows rows from `first` on. Returns where they begin in a row of `out`, whose width is kPanelWidth or, if
// first_output is no multiple of a tile, kUnalignedWidth.
inline float* multiply_outputs(const Weight& weight, const float* bias, const Rows& x, int64_t first, int64_t num_rows,
                               int64_t first_output, int64_t count, int64_t width, float* out) {
  const int64_t tile = first_output / kTile, offset = first_output % kTile;
  const int64_t num_tiles = (offset + count + kTile - 1) / kTile;
  KvFetch fetch;
  for (int64_t c = 0; c < num_tiles; c += kPanelTiles) {
    const int64_t tiles = num_tiles - c < kPanelTiles ? num_tiles - c : kPanelTiles;
    multiply(weight, x, first, num_rows, tile + c, tiles, fetch, out + c * kTile, width);
  }
  out += offset;
  for (int64_t r = 0; bias != nullptr && r < num_rows; ++r) add_values(bias + first_output, count, out + r * width);
  return out;
}

// out[i] = g' / (1 + exp(-alpha * g')) * (u' + 1): see ExpertUpOp.
template <int N>
[[gnu::always_inline]] inline void gate_clamped(const float* gates, const float* ups, float alpha, float limit,
                                                float* out) {
  const F32x16 high = broadcast(limit), low = broadcast(-limit), one = broadcast(1.0f);
  F32x16 g[N], e[N];
  QUIRE_UNROLL for (int i = 0; i < N; ++i) g[i] = min(high, load(gates + i * kLanes));
  QUIRE_UNROLL for (int i = 0; i < N; ++i) e[i] = zero() - broadcast(alpha) * g[i];
  exp(e);
  QUIRE_UNROLL for (int i = 0; i < N; ++i) {
    const F32x16 u = max(low, min(high, load(ups + i * kLanes)));
    store(out + i * kLanes, g[i] / (one + e[i]) * (u + one));
  }
}

inline void gate_clamped(const float* gates, const float* ups, float alpha, float limit, int64_t count, float* out) {
  constexpr int64_t kWidth = kSideBySide * kLanes;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) gate_clamped<kSideBySide>(gates + i, ups + i, alpha, limit, out + i);
  for (; i < count; i += kLanes) {
    float lanes[2][kLanes] = {};
    const size_t bytes = static_cast<size_t>(count - i < kLanes ? count - i : kLanes) * sizeof(float);
    memcpy(lanes[0], gates + i, bytes);
    memcpy(lanes[1], ups + i, bytes);
    gate_clamped<1>(lanes[0], lanes[1], alpha, limit, lanes[0]);
    memcpy(out + i, lanes[0], bytes);
  }
}

inline int64_t stride_of(int64_t row_bytes) { return (row_bytes + 63) / 64 * 64; }

// The rows of x of some tokens, copied one below the other unless there is one, with `padding` zero bytes after each:
// nothing behind a row of odd width is read.
inline Rows gathered(const Rows& x, int64_t row_bytes, int64_t padding, const RoutedRow* routed, int64_t count,
                     std::byte* to) {
  if (count == 1 && padding == 0) return {x.data + routed[0].token * x.stride_bytes, x.stride_bytes, x.type};
  const int64_t stride_bytes = stride_of(row_bytes + padding);
  for (int64_t r = 0; r < count; ++r) {
    std::byte* copy = to + r * stride_bytes;
    memcpy(copy, row<std::byte>(x, routed[r].token), static_cast<size_t>(row_bytes));
    memset(copy + row_bytes, 0, static_cast<size_t>(padding));
  }
  return {to, stride_bytes, x.type};
}

// Fetches the experts that tokens chose, in the order in which they are read.
inline void fetch_chosen(const Weight& weight, const int32_t* counts, int64_t num_experts, Fetcher& fetcher) {
  const int64_t outputs = weight.num_outputs / num_experts;
  for (int64_t e = 0; e < num_experts && weight.data != nullptr; ++e) {
    const int64_t end = counts[e] == 0 ? 0 : ((e + 1) * outputs + kTile - 1) / kTile;
    for (int64_t tile = e * outputs / kTile; tile < end;) {
      const WeightTile first = tile_of(weight, tile);
      const int64_t bytes = tile_bytes(first.weight.format, weight.num_inputs);
      int64_t count = 1;  // of tiles one behind the other
      while (tile + count < end && tile_of(weight, tile + count).data == first.data + count * bytes) ++count;
      fetch(fetcher, first.data, count * bytes);
      tile += count;
    }
  }
}

inline void expert_up(const ExpertUpOp& op, const Context& context) {
  if (context.fetcher != nullptr && context.thread == 0) {
    fetch_first(*context.fetcher);
    fetch_chosen(op.weight, op.counts, op.num_experts, *context.fetcher);
    fetch_chosen(op.down, op.counts, op.num_experts, *context.fetcher);
  }
  const int64_t inner = op.weight.num_outputs / op.num_experts / 2;
  const int64_t panels = (inner + kPanelWidth - 1) / kPanelWidth;
  const int64_t width = inner % kTile == 0 ? kPanelWidth : kUnalignedWidth;
  const int64_t padding = op.x.type == RowType::bf16 ? op.weight.num_inputs % 2 * 2 : 0;
  const int64_t row_bytes = bytes_of_columns(op.x.type, op.weight.num_inputs);
  const int64_t fitting = kGatheredBytes / stride_of(row_bytes + padding);
  const int64_t most = fitting < 1 ? 1 : fitting < kPanelRows ? fitting : kPanelRows;
  // A thread's share are consecutive pieces, a panel of a block each, of about equal work in all.
  int64_t work = 0;
  visit_blocks(op.counts, op.num_experts, most,
               [&](int64_t, int64_t, int64_t count) { work += panels * (count + kRowsOfWeights); });
  const Range mine = share(work, context);
  const TileSession session(op.x.type);
  float* values = reinterpret_cast<float*>(context.scratch);
  float* factors = values + kPanelRows * kUnalignedWidth;
  std::byte* rows = context.scratch + 2 * kPanelRows * kUnalignedWidth * sizeof(float);
  int64_t done = 0;
  visit_blocks(op.counts, op.num_experts, most, [&](int64_t e, int64_t first, int64_t count) {
    const int64_t each = count + kRowsOfWeights, begin = done;
    done += panels * each;
    if (done <= mine.begin || begin >= mine.end) return;
    int64_t panel = mine.begin <= begin ? 0 : (mine.begin - begin + each - 1) / each;
    const int64_t last = mine.end >= done ? panels : (mine.end - begin + each - 1) / each;
    if (panel == last) return;
    const Rows x = gathered(op.x, row_bytes, padding, op.routed + first, count, rows);
    for (; panel < last; ++panel) {
      const int64_t column = panel * kPanelWidth, left = inner - column;
      const int64_t columns = left < kPanelWidth ? left : kPanelWidth, gate = 2 * inner * e + column;
      fetch_to_write(op.out, {first, first + count}, column, columns);
      float* g = multiply_outputs(op.weight, op.bias, x, 0, count, gate, columns, width, values);
      const float* u = multiply_outputs(op.weight, op.bias, x, 0, count, gate + inner, columns, width, factors);
      // All rows at once, with what lies between them.
      const int64_t span = (count - 1) * width + columns;
      if (op.limit > 0.0f) {
        gate_clamped(g, u, op.alpha, op.limit, span, g);
      } else {
        apply(op.activation, g, u, g, span);
      }
      if (op.out.type == RowType::q8) {
        std::byte* blocks = row<std::byte>(op.out, first) + bytes_of_columns(RowType::q8, column);
        quantise(g, count, blocks, op.out.stride_bytes);
        continue;
      }
      for (int64_t r = 0; r < count; ++r) {
        write_columns(op.out, first + r, column, columns, g + r * width);
        if (column + columns == inner) finish_row(op.out, first + r, inner);
      }
    }
  });
}

// to[i] += factor * values[i]
inline void add_scaled(float factor, const float* values, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, fma(broadcast(factor), load(values + i), load(to + i)));
  if (i == count) return;
  float a[kLanes] = {}, b[kLanes] = {};
  const size_t bytes = static_cast<size_t>(count - i) * sizeof(float);
  memcpy(a, values + i, bytes);
  memcpy(b, to + i, bytes);
  store(b, fma(broadcast(factor), load(a), load(b)));
  memcpy(to + i, b, bytes);
}

inline void expert_down(const ExpertDownOp& op, const Context& context) {
  const int64_t outputs = op.weight.num_outputs / op.num_experts;
  const int64_t width = outputs % kTile == 0 ? kPanelWidth : kUnalignedWidth;
  // Each thread has columns of its own in all experts, and so the whole sum of each of its results.
  const Range mine = share((outputs + kPanelWidth - 1) / kPanelWidth, context);
  const TileSession session(op.x.type);
  float* values = reinterpret_cast<float*>(context.scratch);
  const int64_t first_column = mine.begin * kPanelWidth;
  const int64_t end_column = mine.end * kPanelWidth < outputs ? mine.end * kPanelWidth : outputs;
  if (first_column >= end_column) return;
  for (int64_t t = 0; t < context.step->num_tokens && !op.add; ++t) {
    memset(row<float>(op.out, t) + first_column, 0, static_cast<size_t>(end_column - first_column) * sizeof(float));
  }
  visit_blocks(op.counts, op.num_experts, kPanelRows, [&](int64_t e, int64_t first, int64_t count) {
    for (int64_t column = first_column; column < end_column; column += kPanelWidth) {
      const int64_t columns = end_column - column < kPanelWidth ? end_column - column : kPanelWidth;
      const int64_t output = outputs * e + column;
      for (int64_t r = 0; r < count; ++r) {
        const float* to = row<float>(op.out, op.routed[first + r].token) + column;
        for (int64_t i = 0; i < columns; i += kLanes) prefetch_to_write(to + i);
      }
      const float* y = multiply_outputs(op.weight, op.bias, op.x, first, count, output, columns, width, values);
      for (int64_t r = 0; r < count; ++r) {
        const RoutedRow& routed = op.routed[first + r];
        add_scaled(routed.weight, y + r * width, columns, row<float>(op.out, routed.token) + column);
      }
    }
  });
}

QUIRE_OP(expert_up, ExpertUpOp, weight, bias, x, out, routed, counts, num_experts, activation, alpha, limit, down)
QUIRE_OP(expert_down, ExpertDownOp, weight, bias, x, out, routed, counts, num_experts, add)

}  // namespace
}  // namespace quire
