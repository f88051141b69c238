// The ops compiled with the flags of avx512 and its bf16 dot product (CMakeLists.txt).
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable avx512_bf16_ops = make_op_table("avx512_bf16");
}  // namespace quire
