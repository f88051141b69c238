// Products of int8 rows with 4- and 8-bit weights.
#pragma once
#include "isa/simd.h"
#include "ops/embed.h"
#include "plan/types.h"

namespace quire {
namespace {

// See gemm.h: the order of operations.
inline void multiply_q(const Weight& weight, const Rows& x, int64_t first, int64_t num_rows, int64_t tile,
                       int64_t num_tiles, float* out, int64_t out_stride) {
  const int64_t blocks = weight.num_inputs / kBlock, bytes = tile_bytes(weight.format, weight.num_inputs);
  const bool is_q8 = weight.format == WeightFormat::q8;
  const int centre = is_q8 ? 128 : weight.format == WeightFormat::q4 ? 8 : 0;
  for (int64_t c = 0; c < num_tiles; ++c) {
    const std::byte* data = weight.data + (tile + c) * bytes;
    const auto* u = reinterpret_cast<const uint8_t*>(data);
    const auto* scales = reinterpret_cast<const uint16_t*>(data + blocks * (is_q8 ? 512 : 256));
    const auto* minima = scales + blocks * kTile;
    for (int64_t r = 0; r < num_rows; ++r) {
      const ActBlock* acts = row<ActBlock>(x, first + r);
      F32x16 y = zero();
      for (int64_t b = 0; b < blocks; ++b) {
        int32_t products[kTile] = {};
        for (int lane = 0; lane < kTile; ++lane) {
          for (int i = 0; i < kBlock; ++i) {
            int value;
            if (is_q8) {
              value = u[b * 512 + i / 4 * 64 + lane * 4 + i % 4];
            } else {
              const uint8_t pair = u[b * 256 + i / 8 * 64 + lane * 4 + i % 4];
              value = i % 8 < 4 ? pair & 15 : pair >> 4;
            }
            products[lane] += (value - centre) * acts[b].q[i];
          }
        }
        y = fma(to_float(load(products)), widen_f16(scales + b * kTile) * broadcast(acts[b].scale), y);
        if (weight.format == WeightFormat::q4m) {
          y = fma(widen_f16(minima + b * kTile), broadcast(acts[b].scaled_sum), y);
        }
      }
      store(out + r * out_stride + c * kTile, y);
    }
  }
}

}  // namespace
}  // namespace quire
