// The ops compiled with avx512's flags (CMakeLists.txt).
#include "isa/table.h"
#include "ops/rms_norm.h"

namespace quire {
const OpTable avx512_ops = {"avx512", rms_norm<float>, rms_norm<bfloat16_bits>};
}  // namespace quire
