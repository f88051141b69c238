#include "isa/choose.h"

#include <algorithm>
#include <iterator>

#include "isa/cpu.h"

namespace quire {

const OpTable* chosen_ops = built_sets;

OpTable::OpTable(const char* name, std::initializer_list<const OpUnit*> units) : isa(name) {
  for (const OpUnit* unit : units) {
    if (unit->sampling != nullptr) sampling = *unit->sampling;
    if (unit->quantizers != nullptr) quantizers = unit->quantizers;
    for (int32_t i = 0; i < unit->num_ops; ++i) ops.push_back(unit->ops + i);
  }
}

namespace {

const OpTable* built_ops(const std::string& isa) {
  const OpTable* end = built_sets + num_built_sets;
  const OpTable* found = std::find_if(built_sets, end, [&](const OpTable& set) { return set.isa == isa; });
  return found == end ? nullptr : found;
}

}  // namespace

const OpTable* supported_ops(const std::string& isa) { return processor_runs(isa) ? built_ops(isa) : nullptr; }

IsaChoice choose_isa(const std::string& requested, const std::vector<std::string>& distrusted) {
  IsaChoice choice{built_sets, false, "", {}};
  const auto is_listed = [&](const auto& sets) {
    return std::find(std::begin(sets), std::end(sets), requested) != std::end(sets);
  };
  choice.requested_missing = !requested.empty() && (!is_listed(kSetsBestFirst) || supported_ops(requested) == nullptr);
  bool reached = requested.empty() || choice.requested_missing;
  for (const char* isa : kSetsBestFirst) {
    reached = reached || isa == requested;
    if (!reached) continue;
    if (const std::string reason = refusal(isa); !reason.empty()) {
      choice.notes.push_back(std::string(isa) + " is not used: " + reason);
    }
    if (!processor_runs(isa)) continue;
    const OpTable* ops = built_ops(isa);
    if (ops == nullptr) {
      if (choice.unbuilt.empty()) choice.unbuilt = isa;
      choice.notes.push_back(std::string(isa) + " is not used: this build lacks it");
      continue;
    }
    choice.ops = ops;
    if (ops == &scalar_ops()) break;
    const bool trusted = std::find(distrusted.begin(), distrusted.end(), isa) == distrusted.end();
    const std::string failing = trusted ? failing_op(*ops) : "as asked";
    if (failing.empty()) break;
    choice.notes.push_back(std::string(isa) + " is not used: its self-test failed (" + failing + ")");
  }
  return choice;
}

}  // namespace quire
