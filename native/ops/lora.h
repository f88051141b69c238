// Low-rank adapters: y += B (A x) for the rows of requests with an adapter, B being scaled. The op `lora` computes A x
// of a linear layer's rows; the layer's product adds B times that to its sums before anything else (gemm.h), so that
// what follows a product stays in one op with it.
//
// Rows are grouped by adapter: up to four of them share each value of A and B that is read. With one row per adapter
// memory binds, so both are read in long streams and fetched ahead. The sums of a row depend on nothing but the row: A
// x per output of A in 16 lanes, then over the lanes; B (A x) in the order of the rank, from zero on.
#pragma once
#include <algorithm>

#include "ops/rows.h"
#include "plan/op.h"

namespace quire {

// A part of a layer's outputs, whole tiles of 16 of them, and the columns of A x that it reads.
struct LoraPart {
  int64_t first_tile, end_tile;
  const std::byte* b;  // [tile][rank][16]; zero for outputs that are not the part's
  int64_t first_product, rank;
};
constexpr int64_t kMostLoraParts = 8;

// An adapter's matrices of one layer. Values are fp32, or bf16.
struct LoraEntry {
  const std::byte* a;  // [num_products][I, to a multiple of 16]; null: the adapter leaves this layer as it is
  int64_t num_products, num_parts, is_bf16;
  LoraPart parts[kMostLoraParts];
};

// Written before a step.
struct LoraStep {
  int64_t num_groups;     // of rows with the same adapter
  const int32_t* starts;  // [num_groups + 1] where each begins in `rows`
  const int32_t* slots;   // [num_groups] number of the adapter
  const int32_t* rows;    // tokens of the step, in each group ascending
  float* products;        // [T, products_stride]
  int64_t products_stride;
};

struct LoraSite {
  const LoraStep* step;
  const LoraEntry* entries;  // by number of the adapter
};

struct LoraOp {
  Rows x;
  int64_t width;  // I
  const LoraSite* site;
};

namespace {

constexpr int64_t kLoraAheadBytes = 4096;           // of B in a stream
constexpr int64_t kLoraRows = 4, kLoraOutputs = 4;  // together at most; R rows take K = 4 / R outputs or tiles at once:
                                                    // their sums fill half of AVX2's registers

inline int64_t lora_item(bool is_bf16) { return is_bf16 ? 2 : 4; }

template <bool kIsBf16>
inline F32x16 load_lora(const std::byte* values, int64_t index) {
  if constexpr (kIsBf16) return widen_bf16(reinterpret_cast<const uint16_t*>(values) + index);
  return load(reinterpret_cast<const float*>(values) + index);
}

// Calls compute<R>() for 4, 2 or 1 of `count` rows. Returns: R.
template <typename Compute>
inline int64_t for_rows(int64_t count, Compute compute) {
  if (count >= 4) return compute.template operator()<4>(), 4;
  if (count >= 2) return compute.template operator()<2>(), 2;
  return compute.template operator()<1>(), 1;
}

// A row as fp32, with zeros to a multiple of 16.
inline void widen_row(const Rows& x, int64_t index, int64_t width, float* out) {
  int64_t i = 0;
  if (x.type == RowType::q8) {
    for (const auto* block = row<ActBlock>(x, index); i < width; i += kBlock, ++block) {
      for (int64_t k = 0; k < kBlock; ++k) out[i + k] = block->scale * static_cast<float>(block->q[k]);
    }
  } else if (x.type == RowType::bf16) {
    const auto* values = row<uint16_t>(x, index);
    for (; i + kLanes <= width; i += kLanes) store(out + i, widen_bf16(values + i));
    for (; i < width; ++i) {
      const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
      std::memcpy(out + i, &bits, sizeof bits);
    }
  } else {
    std::memcpy(out, row<float>(x, index), static_cast<size_t>(width) * sizeof(float));
    i = width;
  }
  for (; i % kLanes != 0; ++i) out[i] = 0.0f;
}

// Products of R rows with K outputs of A; the lines kLoraOutputs outputs later are fetched.
template <bool kIsBf16, int R, int K>
void lora_block(const std::byte* a, const float* x, int64_t stride, float* const* out, int64_t at) {
  F32x16 y[R][K];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int k = 0; k < K; ++k) y[r][k] = zero(); }
  const int64_t ahead = kLoraOutputs * stride * lora_item(kIsBf16);
  for (int64_t i = 0; i < stride; i += kLanes) {
    QUIRE_UNROLL for (int k = 0; k < K; ++k) {
      const int64_t index = k * stride + i;
      prefetch_l1(a + ahead + index * lora_item(kIsBf16));
      const F32x16 weight = load_lora<kIsBf16>(a, index);
      QUIRE_UNROLL for (int r = 0; r < R; ++r) y[r][k] = fma(weight, load(x + r * stride + i), y[r][k]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int k = 0; k < K; ++k) out[r][at + k] = sum(y[r][k]); }
}

template <bool kIsBf16, int R>
void lora_outputs(int64_t count, const std::byte* a, const float* x, int64_t stride, float* const* out) {
  constexpr int64_t kAtOnce = kLoraOutputs / R;
  for (int64_t k = 0; k < count;) {
    const bool is_full = k + kAtOnce <= count;
    const std::byte* from = a + k * stride * lora_item(kIsBf16);
    (is_full ? lora_block<kIsBf16, R, kAtOnce> : lora_block<kIsBf16, R, 1>)(from, x, stride, out, k);
    k += is_full ? kAtOnce : 1;
  }
}

// Each group's rows are cut into fours, and the outputs of A of these into chunks; a thread's share is consecutive.
inline void lora(const LoraOp& op, const Context& context) {
  const LoraStep& step = *op.site->step;
  const auto chunks_of = [](const LoraEntry& entry) {
    return entry.a == nullptr ? 0 : (entry.num_products + kLoraOutputs - 1) / kLoraOutputs;
  };
  int64_t count = 0;
  for (int64_t g = 0; g < step.num_groups; ++g) {
    const int64_t num_rows = step.starts[g + 1] - step.starts[g];
    count += (num_rows + kLoraRows - 1) / kLoraRows * chunks_of(op.site->entries[step.slots[g]]);
  }
  const Range mine = share(count, context);
  const int64_t stride = (op.width + kLanes - 1) / kLanes * kLanes;
  auto* x = reinterpret_cast<float*>(context.scratch);
  int64_t first = 0;  // chunk
  for (int64_t g = 0; g < step.num_groups && first < mine.end; ++g) {
    const LoraEntry& entry = op.site->entries[step.slots[g]];
    const int64_t chunks = chunks_of(entry), end_row = step.starts[g + 1];
    for (int64_t i = step.starts[g]; i < end_row && first < mine.end; i += kLoraRows, first += chunks) {
      const int64_t begin = mine.begin > first ? mine.begin - first : 0;
      const int64_t end = mine.end - first < chunks ? mine.end - first : chunks;
      if (begin >= end) continue;
      const int64_t k = begin * kLoraOutputs, last = end * kLoraOutputs;
      const int64_t num_outputs = (last < entry.num_products ? last : entry.num_products) - k;
      const std::byte* a = entry.a + k * stride * lora_item(entry.is_bf16 != 0);
      for (int64_t at = i; at < end_row && at < i + kLoraRows;) {
        const int64_t left = (end_row < i + kLoraRows ? end_row : i + kLoraRows) - at;
        at += for_rows(left, [&]<int R>() {
          float* out[R];
          for (int r = 0; r < R; ++r) {
            widen_row(op.x, step.rows[at + r], op.width, x + r * stride);
            out[r] = step.products + step.rows[at + r] * step.products_stride + k;
          }
          (entry.is_bf16 != 0 ? lora_outputs<true, R> : lora_outputs<false, R>)(num_outputs, a, x, stride, out);
        });
      }
    }
  }
}

// values[r][16 C] of R rows and C tiles side by side: B (A x), which `adds` to them or takes their place. B is fetched
// ahead.
template <bool kIsBf16, int R, int C>
void lora_tiles(const std::byte* b, const float* const* products, int64_t rank, float* const* values, int64_t at,
                bool adds) {
  F32x16 y[R][C];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = zero(); }
  for (int64_t k = 0; k < rank; ++k) {
    F32x16 weights[C];
    QUIRE_UNROLL for (int c = 0; c < C; ++c) {
      const int64_t index = (c * rank + k) * kLanes;
      prefetch_l1(b + kLoraAheadBytes + index * lora_item(kIsBf16));
      weights[c] = load_lora<kIsBf16>(b, index);
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r) {
      const F32x16 product = broadcast(products[r][k]);
      QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = fma(weights[c], product, y[r][c]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL for (int c = 0; c < C; ++c) {
      float* to = values[r] + at + c * kTile;
      store(to, adds ? load(to) + y[r][c] : y[r][c]);
    }
  }
}

// Rows of a step, and columns of a layer from `tile` on: a row's values are at values[(row - first) * stride].
struct LoraSums {
  int64_t first, num_rows, tile, num_tiles;
  float* values;
  int64_t stride;
};

// Tiles begin … end - 1 of an adapter's part, and its rows. `shares`: the first of them is the last of the part before.
struct LoraWork {
  const LoraEntry& entry;
  const LoraPart& part;
  int64_t begin, end;
  const int32_t *row, *last;
  bool shares;
};

// Calls visit(work) for each part of an adapter with tiles and rows among these.
template <typename Visit>
inline void for_parts(const LoraSite& site, const LoraSums& sums, Visit visit) {
  const LoraStep& step = *site.step;
  for (int64_t g = 0; g < step.num_groups; ++g) {
    const LoraEntry& entry = site.entries[step.slots[g]];
    if (entry.a == nullptr) continue;
    const int32_t *row = step.rows + step.starts[g], *last = step.rows + step.starts[g + 1];
    if (*row < sums.first || last[-1] >= sums.first + sums.num_rows) {  // a decode's piece has all rows
      row = std::lower_bound(row, last, static_cast<int32_t>(sums.first));
      last = std::lower_bound(row, last, static_cast<int32_t>(sums.first + sums.num_rows));
    }
    for (int64_t p = 0; p < entry.num_parts && row < last; ++p) {
      const LoraPart& part = entry.parts[p];
      const int64_t begin = part.first_tile > sums.tile ? part.first_tile : sums.tile;
      const int64_t end = part.end_tile < sums.tile + sums.num_tiles ? part.end_tile : sums.tile + sums.num_tiles;
      const bool shares = p > 0 && part.first_tile < entry.parts[p - 1].end_tile && begin == part.first_tile;
      if (begin < end) visit(LoraWork{entry, part, begin, end, row, last, shares});
    }
  }
}

// B (A x), which `adds` to the sums or, where a part of an adapter has outputs, takes their place.
inline void compute_lora(const LoraSite& site, const LoraSums& sums, bool adds) {
  const LoraStep& step = *site.step;
  for_parts(site, sums, [&](const LoraWork& work) {
    const LoraPart& part = work.part;
    const bool is_bf16 = work.entry.is_bf16 != 0;
    for (const int32_t* at = work.row; at < work.last;) {
      at += for_rows(work.last - at, [&]<int R>() {
        const float* products[R];
        float* to[R];
        for (int r = 0; r < R; ++r) {
          products[r] = step.products + at[r] * step.products_stride + part.first_product;
          to[r] = sums.values + (at[r] - sums.first) * sums.stride;
        }
        constexpr int64_t kAtOnce = kLoraOutputs / R;
        for (int64_t c = work.begin; c < work.end;) {
          const bool is_shared = work.shares && c == work.begin, is_full = !is_shared && c + kAtOnce <= work.end;
          const auto compute = is_full ? (is_bf16 ? lora_tiles<true, R, kAtOnce> : lora_tiles<false, R, kAtOnce>)
                                       : (is_bf16 ? lora_tiles<true, R, 1> : lora_tiles<false, R, 1>);
          const std::byte* b = part.b + (c - part.first_tile) * part.rank * kLanes * lora_item(is_bf16);
          compute(b, products, part.rank, to, (c - sums.tile) * kTile, adds || is_shared);
          c += is_full ? kAtOnce : 1;
        }
      });
    }
  });
}

// B (A x) of the columns that a thread computes in this op, if they were computed before its products. B is then read
// in one stream per adapter: 8 adapters of rank 16 for one row each add a third less time to products than piece by
// piece (Zen 3, 2 threads).
struct LoraAhead {
  const LoraSite* site;   // null: the engine has no adapters, or no row of the step has one
  LoraSums sums[2] = {};  // gated products have two ranges of columns
  bool is_computed = false;

  explicit LoraAhead(const LoraSite* adapters)
      : site(adapters != nullptr && adapters->step->num_groups > 0 ? adapters : nullptr) {}

  // Columns column … column + count - 1, and as many from `second` on unless it is negative. They are computed if
  // `memory` holds them.
  void compute(int64_t num_rows, int64_t column, int64_t second, int64_t count, float* memory, int64_t num_floats) {
    const int64_t num_tiles = (count + kTile - 1) / kTile, stride = num_tiles * kTile, num_ranges = second < 0 ? 1 : 2;
    is_computed = num_rows * num_ranges * stride <= num_floats;
    for (int64_t i = 0; is_computed && i < num_ranges; ++i) {
      sums[i] = {0, num_rows, (i == 0 ? column : second) / kTile, num_tiles, memory + i * num_rows * stride, stride};
      compute_lora(*site, sums[i], false);
    }
  }

  // Adds B (A x) to a piece's sums.
  void add(const LoraSums& piece, int64_t range) const {
    if (site == nullptr) return;
    if (!is_computed) return compute_lora(*site, piece, true);
    const LoraSums& from = sums[range];
    for_parts(*site, piece, [&](const LoraWork& work) {
      const int64_t begin = work.begin + (work.shares ? 1 : 0);
      for (const int32_t* at = work.row; at < work.last; ++at) {
        const float* values = from.values + *at * from.stride + (begin - from.tile) * kTile;
        float* to = piece.values + (*at - piece.first) * piece.stride + (begin - piece.tile) * kTile;
        add_values(values, (work.end - begin) * kTile, to);
      }
    });
  }
};

QUIRE_OP(lora, LoraOp, x, width, site)

}  // namespace
}  // namespace quire
