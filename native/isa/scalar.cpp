// The ops compiled with scalar's flags (CMakeLists.txt).
#include "isa/table.h"
#include "ops/rms_norm.h"

namespace quire {
const OpTable scalar_ops = {"scalar", rms_norm<float>, rms_norm<bfloat16_bits>};
}  // namespace quire
