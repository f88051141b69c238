// Stored weights to the packed tiles of plan/types.h, once, at load. Compiled without flags of its own: what it costs
// is mostly reading the file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "plan/types.h"
#include "weights/codes.h"

namespace quire {

// Codes of rows `first_row` … and columns `first_column` … of a stored matrix, and what they stand for.
struct CodedRows {
  StoredCodes stored;
  int64_t first_row, first_column;
  // (table[code] - zeros[r, g]) * scales[r, g], g = groups[column]. Row r is that of the output, not of the file.
  const float* table;     // [256]; null: of mxfp4 and nvfp4 only `block_scales` count
  const float* scales;    // [rows, num_groups]
  const float* zeros;     // [rows, num_groups]
  const int32_t* groups;  // [I]
  int64_t num_groups;
  bool is_direct;  // codes, XOR `flipped`, are those of the target
  uint8_t flipped;
  StoredCodes block_scales;  // of mxfp4 and nvfp4, rows as those of `stored`, columns from the same input on
  float factor;              // of nvfp4
};

// Output first_output + r of the packed matrix becomes stored row r, or row_order[r] if row_order is not null.
struct PackedRows {
  std::string stored;  // GGUF's name of the format; a row is a sequence of its blocks
  const std::byte* rows;
  int64_t row_stride_bytes;
  const int32_t* row_order;
  int64_t num_rows;
  int64_t num_inputs;
  WeightFormat target;
  std::byte* packed;  // the whole matrix
  int64_t first_output;
  const int8_t* codebook;  // of IQ formats: int8 entries (weight_tensor.py)
  CodedRows codes;         // of rows stored as "CODES"
  // Of floats whose values are rounded to E4M3 times max|row| / 448 first: the inputs of the whole row, of which
  // num_inputs from `first_input` on are packed. 0: they are not rounded.
  int64_t whole_inputs = 0, first_input = 0;
};

// What can be packed:
//   Q4_0 -> q4, Q4_1 -> q4m, Q5_0 -> q5, Q5_1 -> q5m, Q8_0 -> q8: the same values.
//   Q4_K -> q4k, Q5_K -> q5k, Q6_K -> q6k, IQ4_NL -> iq4nl, IQ4_XS -> iq4xs: the same values.
//   MXFP4 -> mxfp4: the same values, but 0 where a block's factor, 2^scale / 2, is denormal.
//   CODES that are direct -> q4, q4m, q8, mxfp4, nvfp4: the same codes; d and m are rounded to f16, m = -zero * scale.
// These, the other formats of decode.h, and CODES -> a target below, from the decoded values.
//   F32, F16, BF16 -> f32, f16, bf16: rounded to nearest, ties to even.
//   F32, F16, BF16 -> q8: d = max|w| / 127 as f16, u = round(w / d) + 128.
//   F32, F16, BF16 -> q4m: m = min(w), d = (max(w) - m) / 15, both as f16, u = round((w - m) / d), 0 to 15.
// A NaN or infinity among the weights of a quantised block makes the block NaN.
// Outputs that share the last written tile but come after the last written output become zero, so that several jobs
// may fill one matrix in ascending order. Calls that share no tile may run at the same time.
// Throws std::invalid_argument for other pairs, and where num_inputs is no multiple of a block of either format: then
// nothing is packed. The rows of all jobs are shared by num_threads threads, which end before it returns.
void pack_rows(const std::vector<PackedRows>& jobs, int num_threads);

inline int64_t packed_bytes(WeightFormat format, int64_t num_outputs, int64_t num_inputs) {
  return (num_outputs + kTile - 1) / kTile * tile_bytes(format, num_inputs);
}

}  // namespace quire
