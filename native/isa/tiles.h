// Intel AMX's eight tile registers of 16 rows x 64 bytes: the few instructions that ops use, and for tests the same
// instructions in plain C++ (QUIRE_TILES_EMULATED), which run on any processor.
//
// A tile is only as large as configured; loading fills the rest with zeros. The sums of tile_dot_…<C, A, B>:
//   s8    C[m][n] += sum over k, i < 4 of A[m][4 k + i] * B[k][4 n + i], exact in int32
//   bf16  even = sum of A[m][2 k] * B[k][2 n] and odd = sum of A[m][2 k + 1] * B[k][2 n + 1], each a chain of fused
//         multiply-adds from 0 in the order of k; then C[m][n] += even + odd. Denormals are zero.
// (Intel SDM, TDPBSSD and TDPBF16PS.)
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace quire {
namespace {

constexpr int kTileRows = 16, kTileRowBytes = 64, kNumTiles = 8;

struct TileShape {
  uint8_t rows;
  uint16_t row_bytes;
};

#if defined(QUIRE_TILES_EMULATED)

struct EmulatedTiles {
  bool configured;
  TileShape shapes[kNumTiles];
  alignas(64) std::byte data[kNumTiles][kTileRows][kTileRowBytes];
};
thread_local EmulatedTiles emulated;

// The processor raises #UD for a tile that is not configured, and for shapes that do not fit each other.
inline void check(bool valid) {
  if (!valid) __builtin_trap();
}
inline const TileShape& shape(int tile) {
  check(emulated.configured && emulated.shapes[tile].rows > 0);
  return emulated.shapes[tile];
}
inline void configure_tiles(const TileShape (&shapes)[kNumTiles]) {
  memset(&emulated, 0, sizeof emulated);
  for (const TileShape& one : shapes) check(one.rows <= kTileRows && one.row_bytes <= kTileRowBytes);
  memcpy(emulated.shapes, shapes, sizeof shapes);
  emulated.configured = true;
}
inline void release_tiles() { emulated.configured = false; }
template <int kT>
inline void tile_zero() {
  shape(kT);
  memset(emulated.data[kT], 0, sizeof emulated.data[kT]);
}
template <int kT>
inline void tile_load(const void* p, int64_t stride) {
  tile_zero<kT>();
  for (int r = 0; r < shape(kT).rows; ++r) {
    memcpy(emulated.data[kT][r], static_cast<const std::byte*>(p) + r * stride, shape(kT).row_bytes);
  }
}
template <int kT>
inline void tile_store(void* p, int64_t stride) {
  for (int r = 0; r < shape(kT).rows; ++r) {
    memcpy(static_cast<std::byte*>(p) + r * stride, emulated.data[kT][r], shape(kT).row_bytes);
  }
}
template <int kC, int kA, int kB>
inline void check_shapes() {
  check(shape(kC).rows == shape(kA).rows && shape(kC).row_bytes == shape(kB).row_bytes);
  check(shape(kA).row_bytes == 4 * shape(kB).rows);
}
template <int kC, int kA, int kB>
inline void tile_dot_s8() {
  check_shapes<kC, kA, kB>();
  for (int m = 0; m < shape(kC).rows; ++m) {
    auto* sums = reinterpret_cast<int32_t*>(emulated.data[kC][m]);
    for (int k = 0; k < shape(kB).rows; ++k) {
      const auto* a = reinterpret_cast<const int8_t*>(emulated.data[kA][m]) + 4 * k;
      const auto* b = reinterpret_cast<const int8_t*>(emulated.data[kB][k]);
      for (int n = 0; n < shape(kC).row_bytes / 4; ++n) {
        for (int i = 0; i < 4; ++i) sums[n] += a[i] * b[4 * n + i];
      }
    }
  }
}
inline float bf16_value(const std::byte* p) {
  uint16_t half;
  memcpy(&half, p, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
  check_shapes<kC, kA, kB>();
  for (int m = 0; m < shape(kC).rows; ++m) {
    float sums[2][kTileRowBytes / 4] = {};
    const int num_sums = shape(kC).row_bytes / 4;
    for (int k = 0; k < shape(kB).rows; ++k) {
      for (int odd = 0; odd < 2; ++odd) {
        const float a = bf16_value(emulated.data[kA][m] + 4 * k + 2 * odd);
        for (int n = 0; n < num_sums; ++n) {
          sums[odd][n] = __builtin_fmaf(a, bf16_value(emulated.data[kB][k] + 4 * n + 2 * odd), sums[odd][n]);
        }
      }
    }
    auto* out = reinterpret_cast<float*>(emulated.data[kC][m]);
    for (int n = 0; n < num_sums; ++n) out[n] += sums[0][n] + sums[1][n];
  }
}

#else

// Written as assembly, since the compilers' functions take only literal tile numbers, and GCC 12's _tile_loadconfig
// tells the optimiser of 8 of its 64 bytes: it then drops the stores to the others.
inline void configure_tiles(const TileShape (&shapes)[kNumTiles]) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof config == 64);
  for (int i = 0; i < kNumTiles; ++i) {
    config.row_bytes[i] = shapes[i].row_bytes;
    config.rows[i] = shapes[i].rows;
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }
template <int kT>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kT));
}
template <int kT>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kT) : "memory");
}
template <int kT>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kT) : "memory");
}
template <int kC, int kA, int kB>
inline void tile_dot_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace
}  // namespace quire
