// fp32 weights to the 8- and 4-bit formats of plan/types.h; pack.h has the formulas.
#pragma once
#include <cstdint>

#include "plan/types.h"

namespace quire {

// Of inputs that are packed for 16 rows before the next ones: 16 lines of source and the part of a tile stay in L1.
constexpr int64_t kInputsAtOnce = 256;

// A chunk quantised: 8 or 4 bits, and the scales and minima of its blocks.
struct Quantised {
  uint8_t u[kInputsAtOnce];
  uint16_t d[kInputsAtOnce / kBlock], m[kInputsAtOnce / kBlock];
};

void quantise_q8(const float* values, int64_t num_blocks, Quantised& to);
void quantise_q4m(const float* values, int64_t num_blocks, Quantised& to);

}  // namespace quire
