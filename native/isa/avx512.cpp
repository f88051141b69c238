// The ops compiled with the flags of avx512 (CMakeLists.txt).
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable avx512_ops = make_op_table("avx512");
}  // namespace quire
