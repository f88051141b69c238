#include "isa/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {

#if defined(__x86_64__)
namespace {

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

bool has_avx_vnni() { return has_avx2() && cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, {4}); }

bool has_avx512() {
  const Leaf leaf = cpuid(7, 0);
  return has_avx2() && saves({5, 6, 7}) && has(leaf.ebx, {16, 17, 30, 31}) &&  // F, DQ, BW, VL
         has(leaf.ecx, {11});                                                  // VNNI
}

bool has_avx512_bf16() { return has_avx512() && cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, {5}); }

bool processor_has_amx() {
  return has_avx512() && has(cpuid(7, 0).edx, {22, 24, 25}) && saves({17, 18});  // AMX-BF16, -TILE, -INT8
}

// Linux saves the 8 KiB of tiles only for processes that ask (arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)). It refuses
// while some thread has a signal stack too small for them. Once granted it holds for all threads and child processes.
int ask_for_tiles() {
  static const int error = syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 0 : errno;
  return error;
}

}  // namespace

bool processor_runs(const std::string& isa) {
  if (isa == "avx2") return has_avx2();
  if (isa == "avx_vnni") return has_avx_vnni();
  if (isa == "avx512" || isa == "amx_emulated") return has_avx512();
  if (isa == "avx512_bf16") return has_avx512_bf16();
  if (isa == "amx") return processor_has_amx() && ask_for_tiles() == 0;
  return isa == "scalar";
}

std::string refusal(const std::string& isa) {
  if (isa != "amx" || !processor_has_amx() || ask_for_tiles() == 0) return "";
  return std::string("the kernel does not grant its registers (") + std::strerror(ask_for_tiles()) + ")";
}

#elif defined(__aarch64__)
namespace {

#if defined(__linux__)
// Bits of arch/arm64/include/uapi/asm/hwcap.h, which older headers lack.
constexpr unsigned long kAtomics = 1ul << 8, kDotProducts = 1ul << 20;     // AT_HWCAP
constexpr unsigned long kInt8Products = 1ul << 13, kBfloat16 = 1ul << 14;  // AT_HWCAP2

bool has_neon() {
  const unsigned long wanted = kAtomics | kDotProducts;
  return (getauxval(AT_HWCAP) & wanted) == wanted;
}

bool has_neon_i8mm() {
  const unsigned long wanted = kInt8Products | kBfloat16;
  return has_neon() && (getauxval(AT_HWCAP2) & wanted) == wanted;
}
#else
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
#if defined(__APPLE__)
  if (sysctlbyname(feature, &value, &size, nullptr, 0) != 0) return false;
#endif
  return value != 0;
}

bool has_neon() { return has("hw.optional.arm.FEAT_DotProd"); }

bool has_neon_i8mm() { return has_neon() && has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16"); }
#endif

}  // namespace

bool processor_runs(const std::string& isa) {
  if (isa == "neon") return has_neon();
  if (isa == "neon_i8mm") return has_neon_i8mm();
  return isa == "scalar";
}

std::string refusal(const std::string&) { return ""; }

#else

bool processor_runs(const std::string& isa) { return isa == "scalar"; }

std::string refusal(const std::string&) { return ""; }

#endif

}  // namespace quire
