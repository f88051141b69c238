// Products of fp32 rows with fp32 and fp16 weights, and of bf16 rows with bf16 weights.
#pragma once
#include "isa/simd.h"
#include "plan/types.h"

namespace quire {
namespace {

// See gemm.h: the order of operations.
inline void multiply_float(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                           int64_t num_tiles, float* out, int64_t out_stride) {
  const int64_t bytes = tile_bytes(weight.format, weight.num_inputs);
  for (int64_t c = 0; c < num_tiles; ++c) {
    const std::byte* data = weight.data + (tile + c) * bytes;
    const auto* halves = reinterpret_cast<const uint16_t*>(data);
    for (int64_t r = 0; r < num_rows; ++r) {
      F32x16 y = zero();
      if (weight.format == WeightFormat::bf16) {
        const uint16_t* values = row<uint16_t>(x, first + r);
        for (int64_t j = 0; j < (weight.num_inputs + 1) / 2; ++j) {
          uint16_t even[kLanes], odd[kLanes], pair[kLanes] = {values[2 * j], values[2 * j + 1]};
          for (int lane = 0; lane < kLanes; ++lane) {
            even[lane] = halves[(j * kTile + lane) * 2];
            odd[lane] = halves[(j * kTile + lane) * 2 + 1];
          }
          float wide[kLanes];
          store(wide, widen_bf16(pair));
          y = fma(broadcast(wide[1]), widen_bf16(odd), y);
          y = fma(broadcast(wide[0]), widen_bf16(even), y);
        }
      } else {
        const float* values = row<float>(x, first + r);
        for (int64_t i = 0; i < weight.num_inputs; ++i) {
          const F32x16 w = weight.format == WeightFormat::f16
                               ? widen_f16(halves + i * kTile)
                               : load(reinterpret_cast<const float*>(data) + i * kTile);
          y = fma(broadcast(values[i]), w, y);
        }
      }
      store(out + r * out_stride + c * kTile, y);
    }
  }
}

}  // namespace
}  // namespace quire
