// The ops compiled with the flags of avx512, and products on AMX's tile registers (CMakeLists.txt). Not with those of
// VDPBF16PS: on Intel's processors that have AMX it is half as fast as two fused multiply-adds.
#define QUIRE_TILES 1
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable amx_ops = make_op_table("amx");
}  // namespace quire
