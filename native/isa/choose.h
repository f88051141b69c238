// Which instruction set the ops use: the best that the processor, the kernel and this build offer and that passes a
// self-test.
#pragma once
#include <string>
#include <vector>

#include "isa/table.h"

namespace quire {

extern const OpTable* chosen_ops;  // the instruction set in use

// The ops of an instruction set, or null where the processor, the operating system or this build lacks it.
const OpTable* supported_ops(const std::string& isa);

struct IsaChoice {
  const OpTable* ops;
  bool requested_missing;          // an instruction set was asked for that is not there
  std::string unbuilt;             // the best set that the processor runs, if it is better and this build lacks it
  std::vector<std::string> notes;  // why better ones are not used
};

// `requested`, or if it is empty or missing, the best one; each must pass its self-test, else the next lower one is
// taken. Those in `distrusted` count as having failed.
IsaChoice choose_isa(const std::string& requested, const std::vector<std::string>& distrusted);

// The first op whose result differs from the scalar one's on a fixed small input; empty if none does. 1 ms.
std::string failing_op(const OpTable& ops);

// Digests of the self-test's results and of the quantisers': equal on all processors, whatever their kind.
struct ResultDigest {
  std::string name;
  uint64_t digest;
};
std::vector<ResultDigest> result_digests(const OpTable& ops);

}  // namespace quire
