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

// 32 activations as int8: value[i] = scale * q[i], scale = max|value| / 127. `sum` is that of q, `first_sum` that of
// its first half, and `scaled_sum` = scale * float(sum). A row of width I (a multiple of 32) is I / 32 of these.
struct ActBlock {
  int8_t q[kBlock];
  float scale;
  float scaled_sum;
  int32_t sum;
  int32_t first_sum;
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
//   q5, q5m   [I / 32][256 B] nibbles, [I / 32][64 B] fifth bits, then scales d and for q5m minima m as q4m; wants q8
//   q8        [I / 32][8][16][4] u8, then [I / 32][16] f16 scales d; wants q8 rows
//   q4k, q5k  [I / 256] of: [8][256 B] nibbles, for q5k [8][64 B] fifth bits, [8][16] u8 scales s, [8][16] u8 minima n,
//             [16] f16 d, [16] f16 e; wants q8
//   q6k       [I / 256] of: [8][256 B] nibbles, [8][128 B] fifth and sixth bits, [8][2][16] i8 scales s, one for 16
//             inputs, [16] f32 d; wants q8
//   iq4nl     [I / 32][256 B] nibbles, then [I / 32][16] f16 scales d; wants q8
//   iq4xs     [I / 256] of: [8][256 B] nibbles, [8][16] i8 scales s, [16] f32 d; wants q8
//   mxfp4     [I / 32][256 B] nibbles, then [I / 32][16] u8, the exponent bits of fp32 scales d; wants q8
//   nvfp4     [I / 32][256 B] nibbles, then [I / 32][2][16] E4M3 scales s, one for 16 inputs, then [16] f32 d; wants q8
// Value of a weight:  q4: d * (u - 8)   q5: d * (u - 16)   q4m, q5m: d * u + m   q8: d * (u - 128), with u unsigned.
//                     q4k, q5k: (d * s) * u - e * n   q6k: (d * s) * (u - 32), each operation rounded to fp32.
//                     iq4nl, mxfp4: d * c(u)   iq4xs, nvfp4: (d * s) * c(u), c being a codebook (isa/dots_codebook.h).
// Nibbles of block b: 4 chunks of 64 B; byte 4 * lane + i of chunk j holds input 32 b + 8 j + i in its low and
// 32 b + 8 j + 4 + i in its high half, for the tile's output `lane`: what a four-byte dot product wants. The fifth bits
// of these two are bits 2 j and 2 j + 1 of byte 4 * lane + i of the block's line. Fifth and sixth bits are bits 4 k, 4
// k + 1 and 4 k + 2, 4 k + 3 of that byte of line j / 2, with k = j % 2.
enum class WeightFormat : int32_t { f32, f16, bf16, q4, q4m, q5, q5m, q8, q4k, q5k, q6k, iq4nl, iq4xs, mxfp4, nvfp4 };

// A stack of matrices in different formats, which want the same rows, is a list: the outputs of `next` come after a
// part's own, which are a multiple of 32.
struct Weight {
  const std::byte* data;
  int64_t num_outputs;  // N, those of `next` included
  int64_t num_inputs;   // I
  WeightFormat format;
  const Weight* next;  // or null

  int64_t own_outputs() const { return next == nullptr ? num_outputs : num_outputs - next->num_outputs; }
};

constexpr int kTile = 16;

constexpr int kSuper = 256;  // inputs that share a scale of scales in q4k, q5k, q6k and iq4xs

// Where the parts of 256 inputs of a tile start.
struct SuperLayout {
  int64_t high, scales, minima, d, bytes;
};
constexpr SuperLayout super_layout(WeightFormat format) {
  if (format == WeightFormat::q6k) return {2048, 3072, 0, 3328, 3392};
  if (format == WeightFormat::iq4xs) return {0, 2048, 0, 2176, 2240};
  const int64_t scales = format == WeightFormat::q5k ? 2560 : 2048;
  return {2048, scales, scales + 128, scales + 256, scales + 320};
}
constexpr bool has_supers(WeightFormat format) {
  return format == WeightFormat::q4k || format == WeightFormat::q5k || format == WeightFormat::q6k ||
         format == WeightFormat::iq4xs;
}

// Bits of a weight that are stored apart from its lowest four (of q8 from all eight).
constexpr int upper_bits(WeightFormat format) {
  if (format == WeightFormat::q6k) return 2;
  return format == WeightFormat::q5 || format == WeightFormat::q5m || format == WeightFormat::q5k ? 1 : 0;
}

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
    case WeightFormat::iq4nl:
      bytes = blocks * (256 + 32);
      break;
    case WeightFormat::mxfp4:
      bytes = blocks * (256 + 16);
      break;
    case WeightFormat::nvfp4:
      bytes = blocks * (256 + 32) + 64;
      break;
    case WeightFormat::q4m:
      bytes = blocks * (256 + 64);
      break;
    case WeightFormat::q5:
      bytes = blocks * (256 + 64 + 32);
      break;
    case WeightFormat::q5m:
      bytes = blocks * (256 + 64 + 64);
      break;
    case WeightFormat::q8:
      bytes = blocks * (512 + 32);
      break;
    case WeightFormat::q4k:
    case WeightFormat::q5k:
    case WeightFormat::q6k:
    case WeightFormat::iq4xs:
      bytes = num_inputs / kSuper * super_layout(format).bytes;
      break;
  }
  return (bytes + 63) / 64 * 64;
}

// A tile of outputs, and the matrix it belongs to.
struct WeightTile {
  const Weight& weight;
  const std::byte* data;
};
static inline WeightTile tile_of(const Weight& weight, int64_t tile) {
  const Weight* part = &weight;
  for (; part->next != nullptr && tile >= part->own_outputs() / kTile; part = part->next) {
    tile -= part->own_outputs() / kTile;
  }
  return {*part, part->data + tile * tile_bytes(part->format, part->num_inputs)};
}

static inline RowType wanted_rows(WeightFormat format) {
  if (format == WeightFormat::f32 || format == WeightFormat::f16) return RowType::f32;
  return format == WeightFormat::bf16 ? RowType::bf16 : RowType::q8;
}

// --- KV pool ------------------------------------------------------------------------------------------------------

enum class KvFormat : int32_t { f32, f16, bf16, i8, e4m3, e5m2 };

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
class Fetcher;
// Returns when all threads of the step have called it: for an op of two phases. All threads must decide alike.
void wait_for_all(Barrier& barrier);
// Brings weights from a mapped file into memory; `fetch_first` drops what earlier calls asked for.
void fetch_first(Fetcher& fetcher);
void fetch(Fetcher& fetcher, const std::byte* begin, int64_t num_bytes);

// What one thread gets beside its op's parameters. `scratch` is its own, 64-byte aligned, and keeps nothing from one op
// to the next.
struct Context {
  const Step* step;
  int32_t thread;
  int32_t num_threads;
  std::byte* scratch;
  Barrier* barrier;
  int64_t ahead_bytes;  // of keys and values that products may fetch for a layer's attention (kv_ahead.h)
  Fetcher* fetcher;     // null where all weights are in memory
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
