// Low-rank adapters: y += B (A x) for the rows of requests with an adapter, B being scaled. The op `lora` computes A x
// of a linear layer's rows; the layer's product adds B times that to its sums before anything else (gemm.h), so that
// what follows a product stays in one op with it.
//
// Rows are grouped by adapter: up to four of them share each value of A and B that is read. With one row per adapter
// memory binds, so both are fetched ahead: A four outputs ahead of those that are computed, and B of a piece before the
// piece's own product is. The sums of a row depend on nothing but the row: A x per output of A in 16 lanes, then over
// the lanes; B (A x) in the order of the rank, even and odd columns apart.
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

// values[r][16] += B (A x) of R rows and C tiles side by side.
template <bool kIsBf16, int R, int C>
void add_lora_tiles(const std::byte* b, const float* const* products, int64_t rank, float* const* values, int64_t at) {
  for (int64_t parity = 0; parity < 2; ++parity) {
    F32x16 y[R][C];
    QUIRE_UNROLL for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = parity == 0 ? load(values[r] + at + c * kTile) : zero();
    }
    for (int64_t k = parity; k < rank; k += 2) {
      F32x16 weights[C];
      QUIRE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_lora<kIsBf16>(b, (c * rank + k) * kLanes);
      QUIRE_UNROLL for (int r = 0; r < R; ++r) {
        const F32x16 product = broadcast(products[r][k]);
        QUIRE_UNROLL for (int c = 0; c < C; ++c) y[r][c] = fma(weights[c], product, y[r][c]);
      }
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL for (int c = 0; c < C; ++c) {
        float* to = values[r] + at + c * kTile;
        store(to, parity == 0 ? y[r][c] : load(to) + y[r][c]);
      }
    }
  }
}

// The tiles of a piece that a part of an adapter changes.
struct LoraTiles {
  int64_t begin, end;
  LoraTiles(const LoraPart& part, int64_t tile, int64_t num_tiles)
      : begin(part.first_tile > tile ? part.first_tile : tile),
        end(part.end_tile < tile + num_tiles ? part.end_tile : tile + num_tiles) {}
};

inline const std::byte* b_of(const LoraEntry& entry, const LoraPart& part, int64_t tile) {
  return part.b + (tile - part.first_tile) * part.rank * kLanes * lora_item(entry.is_bf16 != 0);
}

// Fetches what `add_lora` will read of these tiles.
inline void fetch_lora(const LoraSite* site, int64_t tile, int64_t num_tiles) {
  if (site == nullptr) return;
  for (int64_t g = 0; g < site->step->num_groups; ++g) {
    const LoraEntry& entry = site->entries[site->step->slots[g]];
    for (int64_t p = 0; entry.a != nullptr && p < entry.num_parts; ++p) {
      const LoraTiles tiles(entry.parts[p], tile, num_tiles);
      if (tiles.begin >= tiles.end) continue;
      const std::byte* end = b_of(entry, entry.parts[p], tiles.end);
      for (const std::byte* at = b_of(entry, entry.parts[p], tiles.begin); at < end; at += 64) prefetch_l1(at);
    }
  }
}

// Adds to the sums of rows first … first + num_rows - 1 and of num_tiles tiles from `tile` on, at values[row][16 *
// tiles]. `site` null: the engine has no adapters.
inline void add_lora(const LoraSite* site, int64_t first, int64_t num_rows, int64_t tile, int64_t num_tiles,
                     float* values, int64_t stride) {
  if (site == nullptr) return;
  const LoraStep& step = *site->step;
  for (int64_t g = 0; g < step.num_groups; ++g) {
    const LoraEntry& entry = site->entries[step.slots[g]];
    if (entry.a == nullptr) continue;
    const int32_t *row = step.rows + step.starts[g], *end = step.rows + step.starts[g + 1];
    if (*row < first || end[-1] >= first + num_rows) {  // a decode's piece has all rows
      row = std::lower_bound(row, end, static_cast<int32_t>(first));
      end = std::lower_bound(row, end, static_cast<int32_t>(first + num_rows));
    }
    for (int64_t p = 0; p < entry.num_parts; ++p) {
      const LoraPart& part = entry.parts[p];
      const LoraTiles tiles(part, tile, num_tiles);
      if (tiles.begin >= tiles.end) continue;
      for (const int32_t* at = row; at < end;) {
        at += for_rows(end - at, [&]<int R>() {
          const float* products[R];
          float* to[R];
          for (int r = 0; r < R; ++r) {
            products[r] = step.products + at[r] * step.products_stride + part.first_product;
            to[r] = values + (at[r] - first) * stride;
          }
          constexpr int64_t kAtOnce = R == 4 ? 1 : 2;
          for (int64_t c = tiles.begin; c < tiles.end;) {
            const bool is_full = c + kAtOnce <= tiles.end, is_bf16 = entry.is_bf16 != 0;
            const auto add = is_full ? (is_bf16 ? add_lora_tiles<true, R, kAtOnce> : add_lora_tiles<false, R, kAtOnce>)
                                     : (is_bf16 ? add_lora_tiles<true, R, 1> : add_lora_tiles<false, R, 1>);
            add(b_of(entry, part, c), products, part.rank, to, (c - tile) * kTile);
            c += is_full ? kAtOnce : 1;
          }
        });
      }
    }
  }
}

QUIRE_OP(lora, LoraOp, x, width, site)

}  // namespace
}  // namespace quire
