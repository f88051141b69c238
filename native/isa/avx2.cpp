// The ops compiled with the flags of avx2 (CMakeLists.txt).
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable avx2_ops = make_op_table("avx2");
}  // namespace quire
