#include "isa/choose.h"

#include <algorithm>
#include <cstdint>

#ifdef QUIRE_X86
#include <cpuid.h>
#endif

namespace quire {

const OpTable* chosen_ops = &scalar_ops;

namespace {

#ifdef QUIRE_X86

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned part) {
  Leaf found;
  __get_cpuid_count(leaf, part, &found.eax, &found.ebx, &found.ecx, &found.edx);
  return found;
}

bool has(unsigned word, std::initializer_list<int> bits) {
  return std::all_of(bits.begin(), bits.end(), [word](int bit) { return (word >> bit) & 1u; });
}

// Register sets that the operating system saves: without that the processor's own word counts for nothing.
bool saves(std::initializer_list<int> bits) {
  if (!has(cpuid(1, 0).ecx, {27})) return false;  // OSXSAVE: xgetbv exists
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return has(low, bits);
}

bool has_avx2() {
  return saves({1, 2}) && has(cpuid(1, 0).ecx, {12, 28, 29}) &&  // FMA, AVX, F16C
         has(cpuid(7, 0).ebx, {5});
}

bool has_avx512() {
  const Leaf leaf = cpuid(7, 0);
  return has_avx2() && saves({5, 6, 7}) && has(leaf.ebx, {16, 17, 30, 31}) &&  // F, DQ, BW, VL
         has(leaf.ecx, {11});                                                  // VNNI
}

bool has_avx512_bf16() { return has_avx512() && cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, {5}); }

#endif

const char* const kBestFirst[] = {"avx512_bf16", "avx512", "avx2", "scalar"};

}  // namespace

const OpTable* supported_ops(const std::string& isa) {
  if (isa == "scalar") return &scalar_ops;
#ifdef QUIRE_X86
  if (isa == "avx2" && has_avx2()) return &avx2_ops;
  if (isa == "avx512" && has_avx512()) return &avx512_ops;
  if (isa == "avx512_bf16" && has_avx512_bf16()) return &avx512_bf16_ops;
#endif
  return nullptr;
}

IsaChoice choose_isa(const std::string& requested, const std::vector<std::string>& distrusted) {
  IsaChoice choice{&scalar_ops, false, {}};
  const bool listed = std::find(std::begin(kBestFirst), std::end(kBestFirst), requested) != std::end(kBestFirst);
  choice.requested_missing = !requested.empty() && (!listed || supported_ops(requested) == nullptr);
  bool reached = requested.empty() || choice.requested_missing;
  for (const char* isa : kBestFirst) {
    reached = reached || isa == requested;
    const OpTable* ops = reached ? supported_ops(isa) : nullptr;
    if (ops == nullptr) continue;
    if (ops == &scalar_ops) break;
    const bool trusted = std::find(distrusted.begin(), distrusted.end(), isa) == distrusted.end();
    const std::string failing = trusted ? failing_op(*ops) : "as asked";
    if (failing.empty()) {
      choice.ops = ops;
      break;
    }
    choice.notes.push_back(std::string(isa) + " is not used: its self-test failed (" + failing + ")");
  }
  return choice;
}

}  // namespace quire
