// Prints the digests of each instruction set that this processor runs, in the order of choice, and what its self-test
// says: for kinds of processors on which Python does not run (tests/kernels/test_arm.py).
#include <cinttypes>
#include <cstdio>

#include "isa/choose.h"
#include "isa/cpu.h"

int main() {
  for (const char* isa : quire::kSetsBestFirst) {
    const quire::OpTable* ops = quire::supported_ops(isa);
    if (ops == nullptr) continue;
    std::printf("%s\tself-test\t%s\n", isa, quire::failing_op(*ops).c_str());
    for (const auto& [name, digest] : quire::result_digests(*ops)) {
      std::printf("%s\t%s\t%016" PRIx64 "\n", isa, name.c_str(), digest);
    }
  }
}
