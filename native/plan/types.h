// What ops read and write: rows of activations, packed weights, the KV pool and one step's batch. No Python, no torch.
//
// Letters as everywhere: T tokens of the step, R requests, S rows that need logits, H query heads, K KV heads, D head
// size, E model width, F MLP width, V vocabulary, B tokens per block, N outputs and I inputs of a linear layer.
//
// Functions are `static`: each instruction set has its own (isa/simd.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// --- Activations --------------------------------------------------------------------------------------------------

enum class RowType : int32_t { f32, bf16, q8 };

constexpr int kBlock = 32;  // values that share a scale

// 32 activations as int8: value[i] = scale * q[i], scale = max|value| / 127. `sum` is that of q, and
// `scaled_sum` = scale * float(sum). A row of width I (a multiple of 32) is I / 32 of these.
struct ActBlock {
  int8_t q[kBlock];
  float scale;
  float scaled_sum;
  int32_t sum;
  int32_t unused;
};
static_assert(sizeof(ActBlock) == 48);

// [T, width] activations; row t starts at data + t * stride_bytes. bf16 rows of odd width have one zero after them.
struct Rows {
  std::byte* data;
  int64_t stride_bytes;
  RowType type;
};

template <typename T>
static inline T* row(const Rows& rows, int64_t index) {
  return reinterpret_cast<T*>(rows.data + index * rows.stride_bytes);
}

// --- Weights ------------------------------------------------------------------------------------------------------

// A packed [N, I] matrix: tiles of 16 outputs, ceil(N / 16) of them, outputs past N being zero. One tile is contiguous
// and starts at a multiple of 64 bytes:
//   f32, f16  [I][16]                       wants f32 rows
//   bf16      [ceil(I / 2)][16][2]          wants bf16 rows: pairs of inputs; an odd I is padded with zero
//   q4, q4m   [I / 32][256 B] nibbles, then [I / 32][16] f16 scales d, then for q4m [I / 32][16] f16 minima m; wants q8
//   q8        [I / 32][8][16][4] u8, then [I / 32][16] f16 scales d; wants q8 rows
// Value of a weight:  q4: d * (u - 8)   q4m: d * u + m   q8: d * (u - 128), with u unsigned.
// Nibbles of block b: 4 chunks of 64 B; byte 4 * lane + i of chunk j holds input 32 b + 8 j + i in its low and
// 32 b + 8 j + 4 + i in its high half, for the tile's output `lane`: what a four-byte dot product wants.
enum class WeightFormat : int32_t { f32, f16, bf16, q4, q4m, q8 };

struct Weight {
  const std::byte* data;
  int64_t num_outputs;  // N
  int64_t num_inputs;   // I
  WeightFormat format;
};

constexpr int kTile = 16;

static inline int64_t tile_bytes(WeightFormat format, int64_t num_inputs) {
  const int64_t blocks = num_inputs / kBlock;
  int64_t bytes = 0;
  switch (format) {
    case WeightFormat::f32:
      bytes = num_inputs * kTile * 4;
      break;
    case WeightFormat::f16:
      bytes = num_inputs * kTile * 2;
      break;
    case WeightFormat::bf16:
      bytes = (num_inputs + 1) / 2 * kTile * 4;
      break;
    case WeightFormat::q4:
      bytes = blocks * (256 + 32);
      break;
    case WeightFormat::q4m:
      bytes = blocks * (256 + 64);
      break;
    case WeightFormat::q8:
      bytes = blocks * (512 + 32);
      break;
  }
  return (bytes + 63) / 64 * 64;
}

static inline RowType wanted_rows(WeightFormat format) {
  if (format == WeightFormat::f32 || format == WeightFormat::f16) return RowType::f32;
  return format == WeightFormat::bf16 ? RowType::bf16 : RowType::q8;
}

// --- KV pool ------------------------------------------------------------------------------------------------------

enum class KvFormat : int32_t { f32, f16, bf16, i8 };

// One layer's share of the block pool. Block b of the layer is at base + b * block_stride_bytes and holds, for each
// of the K heads, keys then values (layout: ops/kv_cache.h); block_size is a multiple of 16.
struct KvLayer {
  std::byte* base;
  int64_t block_stride_bytes;
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_size;
  KvFormat format;
  int32_t group;  // which block tables
};

// A part of the keys and values that the next attention reads first: from share `begin` to share `end`, which
// are from 0 to 1.
struct KvAhead {
  KvLayer kv;
  int64_t window;  // 0: all
  double begin, end;
};

enum class Activation : int32_t { none, relu, gelu, gelu_tanh, silu, relu2 };

// --- One step -----------------------------------------------------------------------------------------------------

// Requests with their new tokens, flat and ragged: request r computes positions starts[r] … starts[r] + counts[r] - 1,
// and owns tokens first_tokens[r] … first_tokens[r + 1] - 1 of the step. Its known tokens and block tables are row
// request_rows[r] of the runner's tables.
struct Step {
  int64_t num_requests;
  int64_t num_tokens;
  int64_t num_logit_rows;
  const int32_t* request_rows;  // [R]
  const int32_t* starts;        // [R]
  const int32_t* counts;        // [R]
  const int32_t* logit_rows;    // [S] tokens of the step
  const int32_t* tokens;        // [rows, tokens_stride]
  int64_t tokens_stride;
  const int32_t* block_tables;  // [groups, rows, table_stride]
  int64_t table_stride;
  int64_t group_stride;  // in elements
  bool allows_tiles;     // false: one arithmetic for any number of rows, without AMX's tiles where they are another
  // Worked out by the plan before the first op:
  const int32_t* first_tokens;    // [R + 1]
  const int32_t* token_ids;       // [T]
  const int32_t* positions;       // [T]
  const int32_t* token_requests;  // [T] index r of the request

  const int32_t* block_table(int32_t group, int64_t request) const {
    return block_tables + group * group_stride + request_rows[request] * table_stride;
  }
};

class Barrier;
// Returns when all threads of the step have called it: for an op of two phases. All threads must decide alike.
void wait_for_all(Barrier& barrier);

// What one thread gets beside its op's parameters. `scratch` is its own, 64-byte aligned, and keeps nothing from one op
// to the next.
struct Context {
  const Step* step;
  int32_t thread;
  int32_t num_threads;
  std::byte* scratch;
  Barrier* barrier;
  int64_t ahead_bytes;  // of keys and values that products may fetch for a layer's attention (kv_ahead.h)
};

constexpr int64_t kScratchBytes = 1 << 20;

// Another thread's scratch, for what an op's threads leave for each other before they meet.
inline std::byte* scratch_of(const Context& context, int64_t thread) {
  return context.scratch + (thread - context.thread) * kScratchBytes;
}

// The rows of an op: S logit rows, or T tokens.
static inline int64_t num_rows(const Context& context, bool of_logit_rows) {
  return of_logit_rows ? context.step->num_logit_rows : context.step->num_tokens;
}

// The share of `thread` in 0 … count - 1, as [begin, end).
struct Range {
  int64_t begin, end;
};
static inline Range share(int64_t count, const Context& context) {
  return {count * context.thread / context.num_threads, count * (context.thread + 1) / context.num_threads};
}

}  // namespace quire
