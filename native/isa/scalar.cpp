// The ops compiled without flags of their own: what every processor runs.
#include "isa/all_ops.h"

namespace quire {
constinit const OpTable scalar_ops = make_op_table("scalar");
}  // namespace quire
