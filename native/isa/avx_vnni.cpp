// The ops compiled with the flags of avx_vnni (CMakeLists.txt): AVX2 with VNNI's products of bytes.
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable avx_vnni_ops = make_op_table("avx_vnni");
}  // namespace quire
