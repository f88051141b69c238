#include "isa/choose.h"

#include <algorithm>
#include <cstdint>

#ifdef QUIRE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
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

#ifdef QUIRE_AVX_VNNI
bool has_avx_vnni() { return has_avx2() && cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, {4}); }
#endif

bool has_avx512() {
  const Leaf leaf = cpuid(7, 0);
  return has_avx2() && saves({5, 6, 7}) && has(leaf.ebx, {16, 17, 30, 31}) &&  // F, DQ, BW, VL
         has(leaf.ecx, {11});                                                  // VNNI
}

bool has_avx512_bf16() { return has_avx512() && cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, {5}); }

#ifdef QUIRE_AMX

bool processor_has_amx() {
  return has_avx512() && has(cpuid(7, 0).edx, {22, 24, 25}) && saves({17, 18});  // AMX-BF16, -TILE, -INT8
}

// Linux saves the 8 KiB of tiles only for processes that ask (arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)). It refuses
// while some thread has a signal stack too small for them. Once granted it holds for all threads and child processes.
int ask_for_tiles() {
  static const int error = syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : errno;
  return error;
}

#endif
#endif

// Why an instruction set that the processor has cannot be used; empty if it can, or if the processor lacks it.
std::string refusal(const std::string& isa) {
#ifdef QUIRE_AMX
  if (isa == "amx" && processor_has_amx() && ask_for_tiles() != 0) {
    return std::string("the kernel does not grant its registers (") + std::strerror(ask_for_tiles()) + ")";
  }
#endif
  (void)isa;
  return "";
}

const char* const kBestFirst[] = {"amx", "avx512_bf16", "avx512", "avx_vnni", "avx2", "scalar"};

}  // namespace

const OpTable* supported_ops(const std::string& isa) {
  if (isa == "scalar") return &scalar_ops;
#ifdef QUIRE_X86
  if (isa == "avx2" && has_avx2()) return &avx2_ops;
#ifdef QUIRE_AVX_VNNI
  if (isa == "avx_vnni" && has_avx_vnni()) return &avx_vnni_ops;
#endif
  if (isa == "avx512" && has_avx512()) return &avx512_ops;
  if (isa == "avx512_bf16" && has_avx512_bf16()) return &avx512_bf16_ops;
  if (isa == "amx_emulated" && has_avx512()) return &amx_emulated_ops;
#ifdef QUIRE_AMX
  if (isa == "amx" && processor_has_amx() && ask_for_tiles() == 0) return &amx_ops;
#endif
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
    if (!reached) continue;
    if (const std::string reason = refusal(isa); !reason.empty()) {
      choice.notes.push_back(std::string(isa) + " is not used: " + reason);
    }
    const OpTable* ops = supported_ops(isa);
    if (ops == nullptr) continue;
    choice.ops = ops;
    if (ops == &scalar_ops) break;
    const bool trusted = std::find(distrusted.begin(), distrusted.end(), isa) == distrusted.end();
    const std::string failing = trusted ? failing_op(*ops) : "as asked";
    if (failing.empty()) break;
    choice.notes.push_back(std::string(isa) + " is not used: its self-test failed (" + failing + ")");
  }
  return choice;
}

}  // namespace quire
