// Python binding of the native ops: chooses an instruction set at import, takes raw addresses.
//
// QUIRE_ISA=scalar|avx2|avx_vnni|avx512|avx512_bf16|amx|neon|neon_i8mm overrides the choice. Where the processor or
// this build lacks that set, or the name is another, the best one there is used and `requested_isa_missing` says so: a
// wrong setting must not keep the engine from starting.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "isa/choose.h"
#include "isa/cpu.h"

namespace nb = nanobind;

namespace quire {
void bind_plan(nb::module_& m);      // plan/bindings.cpp
void bind_ranks(nb::module_& m);     // ranks/bindings.cpp
void bind_sampling(nb::module_& m);  // sampling/bindings.cpp
void bind_text(nb::module_& m);      // text/bindings.cpp
void bind_weights(nb::module_& m);   // weights/bindings.cpp
}  // namespace quire

namespace {

void bind_choice(nb::module_& m) {
  const char* requested = std::getenv("QUIRE_ISA");
  const quire::IsaChoice choice = quire::choose_isa(requested == nullptr ? "" : requested, {});
  quire::chosen_ops = choice.ops;
  m.attr("requested_isa_missing") = choice.requested_missing;
  m.attr("unbuilt_isa") = choice.unbuilt;
  m.def("isa", [] { return std::string(quire::chosen_ops->isa); }, "The instruction set in use.");
  m.def(
      "isa_notes", [notes = choice.notes] { return notes; },
      "Why better instruction sets that this processor has were not chosen.");
  m.def(
      "isa_supported", [](const std::string& isa) { return quire::supported_ops(isa) != nullptr; }, nb::arg("isa"),
      "Whether this processor and this build have the instruction set.");
  m.def(
      "set_isa",
      [](const std::string& isa) {
        const quire::OpTable* ops = quire::supported_ops(isa);
        if (ops == nullptr) throw nb::value_error(("this processor or build lacks " + isa).c_str());
        quire::chosen_ops = ops;
      },
      nb::arg("isa"), "Switch the instruction set; for tests.");
  m.def(
      "choose_isa",
      [](const std::string& requested, const std::vector<std::string>& distrusted) {
        const quire::IsaChoice found = quire::choose_isa(requested, distrusted);
        return nb::make_tuple(std::string(found.ops->isa), found.requested_missing, found.notes);
      },
      nb::arg("requested"), nb::arg("distrusted"),
      "What would be chosen if QUIRE_ISA were `requested` and those in `distrusted` failed their self-test.");
  m.def(
      "self_test",
      [](const std::string& isa) {
        const quire::OpTable* ops = quire::supported_ops(isa);
        if (ops == nullptr) throw nb::value_error(("this processor or build lacks " + isa).c_str());
        return quire::failing_op(*ops);
      },
      nb::arg("isa"), "The first op of this instruction set whose result is wrong; empty if all are right.");
  m.def(
      "result_digests",
      [](const std::string& isa) {
        const quire::OpTable* ops = quire::supported_ops(isa);
        if (ops == nullptr) throw nb::value_error(("this processor or build lacks " + isa).c_str());
        nb::list digests;
        for (const auto& [name, digest] : quire::result_digests(*ops)) digests.append(nb::make_tuple(name, digest));
        return digests;
      },
      nb::arg("isa"), "Digests of the self-test's results by name, the same on every processor without tiles.");
}

}  // namespace

NB_MODULE(_native, m) {
#ifdef QUIRE_AVX2_ALONE
  if (!quire::processor_runs("avx2")) {
    throw nb::import_error("Quire was compiled for processors with AVX2, which this one lacks: compile it again");
  }
#endif
  m.doc() = "Quire's native CPU ops. Addresses are `tensor.data_ptr()` of contiguous tensors.";
#ifdef QUIRE_RELEASE
  nb::set_leak_warnings(false);  // of use to developers only
#endif
  bind_choice(m);
  quire::bind_plan(m);
  quire::bind_ranks(m);
  quire::bind_sampling(m);
  quire::bind_text(m);
  quire::bind_weights(m);
}
