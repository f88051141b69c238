// For tests: what isa/amx.cpp compiles, but with AMX's instructions in plain C++, for processors with AVX-512 only.
#define QUIRE_TILES 1
#define QUIRE_TILES_EMULATED 1
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable amx_emulated_ops = make_op_table("amx_emulated");
}  // namespace quire
