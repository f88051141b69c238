// fp32 weights to the 8- and 4-bit formats of plan/types.h; pack.h has the formulas.
#pragma once
#include <cstdint>

#include "plan/types.h"
#include "weights/decode.h"

namespace quire {

// Of inputs that are packed for 16 rows before the next ones: 16 lines of source and the part of a tile stay in L1.
constexpr int64_t kInputsAtOnce = 256;

// A chunk of a row as a packed format has it: codes of 8 or 4 bits, scales and minima of its blocks.
struct Quantised {
  uint8_t u[kInputsAtOnce];
  uint16_t d[kInputsAtOnce / kBlock], m[kInputsAtOnce / kBlock];
};

// The largest magnitude of `count` values, a multiple of 32, and `before`; NaN if one is not finite.
float largest_magnitude(const float* values, int64_t count, float before);
// Values of at most 448 · `scale` in magnitude become multiples of it, nearest ones of E4M3, ties to even.
void round_to_e4m3(float* values, int64_t count, float scale);
void quantise_q8(const float* values, int64_t num_blocks, Quantised& to);
void quantise_q4m(const float* values, int64_t num_blocks, Quantised& to);
// kInputsAtOnce values of each of at most 16 rows, from a decoder with a table: the bytes of quantise_q8 of the values
// that they stand for. A block has few values, so that these are quantised, and weights look them up.
void quantise_codes_q8(const Integers* rows, int64_t num_rows, const BlockDecoder& decoder, Quantised* to);

// Puts rows first_lane to 15 of a tile of num_blocks blocks at its blocks `first` to `first + count - 1`. Whole lines
// are written: with the words of a row apart this took a third of the time of packing.
void put_rows(const Quantised* rows, int64_t first_lane, WeightFormat target, int64_t first, int64_t count,
              int64_t num_blocks, std::byte* tile);

}  // namespace quire
