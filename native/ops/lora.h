// Low-rank adapters: y += B (A x) for the rows of requests with an adapter, B being scaled. The op `lora` computes A x
// of a linear layer's rows; the layer's product adds B times that to its sums before anything else (gemm.h), so that
// what follows a product stays in one op with it.
//
// Rows are grouped by adapter, so that its matrices are read once for several rows. The sums of a row depend on
// nothing but the row: A x per output of A in 16 lanes, then over the lanes; B (A x) in the order of the rank, even and
// odd columns apart.
#pragma once
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
  int64_t num_rows;      // that have an adapter
  const int32_t* rows;   // [num_rows] tokens of the step, those of an adapter side by side
  const int32_t* slots;  // [T] number of the adapter; -1: none
  float* products;       // [T, products_stride]
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

constexpr int64_t kLoraRows = 4, kLoraOutputs = 4;  // together at most; R rows take K = 4 / R outputs at once: their
                                                    // sums fill half of AVX2's registers

inline F32x16 load_lora(const std::byte* values, int64_t index, bool is_bf16) {
  return is_bf16 ? widen_bf16(reinterpret_cast<const uint16_t*>(values) + index)
                 : load(reinterpret_cast<const float*>(values) + index);
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

// Products of R rows with K outputs of A.
template <bool kIsBf16, int R, int K>
void lora_block(const std::byte* a, const float* x, int64_t stride, float* const* out) {
  F32x16 y[R][K];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int k = 0; k < K; ++k) y[r][k] = zero(); }
  for (int64_t i = 0; i < stride; i += kLanes) {
    QUIRE_UNROLL for (int k = 0; k < K; ++k) {
      const F32x16 weight = load_lora(a, k * stride + i, kIsBf16);
      QUIRE_UNROLL for (int r = 0; r < R; ++r) y[r][k] = fma(weight, load(x + r * stride + i), y[r][k]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; ++r) { QUIRE_UNROLL for (int k = 0; k < K; ++k) out[r][k] = sum(y[r][k]); }
}

template <bool kIsBf16, int R>
void lora_outputs(int64_t count, const std::byte* a, const float* x, int64_t stride, float* const* out) {
  constexpr int64_t kAtOnce = kLoraOutputs / R;
  for (int64_t k = 0; k < count;) {
    float* to[R];
    for (int r = 0; r < R; ++r) to[r] = out[r] + k;
    const bool is_full = k + kAtOnce <= count;
    const std::byte* from = a + k * stride * (kIsBf16 ? 2 : 4);
    (is_full ? lora_block<kIsBf16, R, kAtOnce> : lora_block<kIsBf16, R, 1>)(from, x, stride, to);
    k += is_full ? kAtOnce : 1;
  }
}

// The outputs of A that a thread computes are consecutive, row by row.
inline void lora(const LoraOp& op, const Context& context) {
  const LoraStep& step = *op.site->step;
  const auto entry_of = [&](int64_t i) -> const LoraEntry& { return op.site->entries[step.slots[step.rows[i]]]; };
  const auto chunks_of = [](const LoraEntry& entry) {
    return entry.a == nullptr ? 0 : (entry.num_products + kLoraOutputs - 1) / kLoraOutputs;
  };
  // Rows from i on that are computed together.
  const auto rows_from = [&](int64_t i) {
    int64_t count = 1;
    while (count < kLoraRows && i + count < step.num_rows &&
           step.slots[step.rows[i]] == step.slots[step.rows[i + count]]) {
      ++count;
    }
    return count == 3 ? int64_t{2} : count;
  };
  int64_t count = 0;
  for (int64_t i = 0; i < step.num_rows; i += rows_from(i)) count += chunks_of(entry_of(i));
  const Range mine = share(count, context);
  const int64_t stride = (op.width + kLanes - 1) / kLanes * kLanes;
  auto* x = reinterpret_cast<float*>(context.scratch);
  for (int64_t i = 0, first = 0; i < step.num_rows && first < mine.end;) {
    const LoraEntry& entry = entry_of(i);
    const int64_t chunks = chunks_of(entry), rows = rows_from(i);
    const int64_t begin = mine.begin > first ? mine.begin - first : 0;
    const int64_t end = mine.end - first < chunks ? mine.end - first : chunks;
    for (int64_t r = 0; r < rows && begin < end; ++r) widen_row(op.x, step.rows[i + r], op.width, x + r * stride);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t k = chunk * kLoraOutputs, left = entry.num_products - k;
      const int64_t outputs = left < kLoraOutputs ? left : kLoraOutputs;
      const std::byte* a = entry.a + k * stride * (entry.is_bf16 != 0 ? 2 : 4);
      float* out[kLoraRows];
      for (int64_t r = 0; r < rows; ++r) out[r] = step.products + step.rows[i + r] * step.products_stride + k;
      const bool is_bf16 = entry.is_bf16 != 0;
      if (rows == 4) {
        (is_bf16 ? lora_outputs<true, 4> : lora_outputs<false, 4>)(outputs, a, x, stride, out);
      } else if (rows == 2) {
        (is_bf16 ? lora_outputs<true, 2> : lora_outputs<false, 2>)(outputs, a, x, stride, out);
      } else {
        (is_bf16 ? lora_outputs<true, 1> : lora_outputs<false, 1>)(outputs, a, x, stride, out);
      }
    }
    first += chunks;
    i += rows;
  }
}

// values[16] += B (A x) of C tiles side by side: one sum of even and one of odd columns, so that none waits for itself.
template <bool kIsBf16, int C>
void add_lora_tiles(const std::byte* b, const float* products, int64_t rank, float* values) {
  F32x16 even[C], odd[C];
  QUIRE_UNROLL for (int c = 0; c < C; ++c) {
    even[c] = load(values + c * kTile);
    odd[c] = zero();
  }
  int64_t k = 0;
  for (; k + 2 <= rank; k += 2) {
    const F32x16 first = broadcast(products[k]), second = broadcast(products[k + 1]);
    QUIRE_UNROLL for (int c = 0; c < C; ++c) {
      even[c] = fma(load_lora(b, (c * rank + k) * kLanes, kIsBf16), first, even[c]);
      odd[c] = fma(load_lora(b, (c * rank + k + 1) * kLanes, kIsBf16), second, odd[c]);
    }
  }
  QUIRE_UNROLL for (int c = 0; c < C; ++c) {
    if (k < rank) even[c] = fma(load_lora(b, (c * rank + k) * kLanes, kIsBf16), broadcast(products[k]), even[c]);
    store(values + c * kTile, even[c] + odd[c]);
  }
}

// Adds to the sums of rows first … first + num_rows - 1 and of num_tiles tiles from `tile` on, at values[row][16 *
// tiles]. `site` null: the engine has no adapters.
inline void add_lora(const LoraSite* site, int64_t first, int64_t num_rows, int64_t tile, int64_t num_tiles,
                     float* values, int64_t stride) {
  if (site == nullptr || site->step->num_rows == 0) return;
  const LoraStep& step = *site->step;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int32_t slot = step.slots[first + r];
    if (slot < 0) continue;
    const LoraEntry& entry = site->entries[slot];
    for (int64_t p = 0; entry.a != nullptr && p < entry.num_parts; ++p) {
      const LoraPart& part = entry.parts[p];
      const int64_t begin = part.first_tile > tile ? part.first_tile : tile;
      const int64_t end = part.end_tile < tile + num_tiles ? part.end_tile : tile + num_tiles;
      const float* products = step.products + (first + r) * step.products_stride + part.first_product;
      const bool is_bf16 = entry.is_bf16 != 0;
      for (int64_t c = begin; c < end;) {
        const std::byte* b = part.b + (c - part.first_tile) * part.rank * kLanes * (is_bf16 ? 2 : 4);
        const bool is_pair = c + 2 <= end;
        const auto add = is_pair ? (is_bf16 ? add_lora_tiles<true, 2> : add_lora_tiles<false, 2>)
                                 : (is_bf16 ? add_lora_tiles<true, 1> : add_lora_tiles<false, 1>);
        add(b, products, part.rank, values + r * stride + (c - tile) * kTile);
        c += is_pair ? 2 : 1;
      }
    }
  }
}

QUIRE_OP(lora, LoraOp, x, width, site)

}  // namespace
}  // namespace quire
