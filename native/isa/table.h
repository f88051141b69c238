// What each instruction set provides: the ops of plans, in one order for all sets, the sampler's kernels and
// the quantisers.
//
// A set is compiled in a few units (CMakeLists.txt), each of which has the ops of some headers; its table lists them
// all.
#pragma once
#include <cstring>
#include <initializer_list>
#include <vector>

#include "plan/op.h"
#include "sampling/table.h"
#include "weights/quantize_table.h"

namespace quire {

// The part of a set that one unit has.
struct OpUnit {
  const SamplingKernels* sampling;   // or null
  const BlockQuantizer* quantizers;  // [kNumQuantizers] or null
  int32_t num_ops;
  const Op* ops;
};

struct OpTable {
  const char* isa;
  SamplingKernels sampling{};
  const BlockQuantizer* quantizers = nullptr;
  std::vector<const Op*> ops;

  OpTable(const char* name, std::initializer_list<const OpUnit*> units);
};

static inline bool has_tiles(const OpTable& ops) { return std::strncmp(ops.isa, "amx", 3) == 0; }

// The sets of this build (written by CMake); the scalar one comes first.
extern const OpTable built_sets[];
extern const int32_t num_built_sets;
static inline const OpTable& scalar_ops() { return built_sets[0]; }

}  // namespace quire
