// fp32 weights to the quantised blocks of a GGUF file, once, when a file is written. Layouts: ggml-common.h of ggml.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace quire {

struct QuantizedRows {
  std::string format;       // GGUF's name
  const float* rows;        // [num_rows, num_inputs], finite
  const float* importance;  // [num_inputs]: weight of a squared error in each column; null: all are 1
  int64_t num_rows;
  int64_t num_inputs;
  std::byte* out;  // [num_rows, bytes of a row]
};

// Chooses scales, minima and integers of each block so that the weighted squared error is small:
//   Σ w (x - s q - m)², w = importance · sqrt(mean of x² in the row + x²).
// A scale is searched for among those that put the extreme values near the ends of the integers' range; for each the
// integers are rounded and the best s and m for them follow in closed form. Scales of scales are rounded, tried with
// their neighbours, and the block's factors solved again for the integers found. Deterministic: rows do not depend on
// each other or on num_threads.
// Throws std::invalid_argument for another format and where num_inputs is no multiple of its block.
void quantize_rows(const QuantizedRows& job, int num_threads);

}  // namespace quire
