// The ops compiled with avx2's flags (CMakeLists.txt).
#include "isa/table.h"
#include "ops/rms_norm.h"

namespace quire {
const OpTable avx2_ops = {"avx2", rms_norm<float>, rms_norm<bfloat16_bits>};
}  // namespace quire
