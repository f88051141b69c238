// CMake runs this for QUIRE_ISAS=native or runnable: prints the sets that this processor runs, the best first.
#include <cstdio>

#include "isa/cpu.cpp"  // in place of a link: CMake's try_run takes one source

int main() {
  for (const char* isa : quire::kSetsBestFirst) {
    if (quire::processor_runs(isa)) std::printf("%s;", isa);
  }
  if (quire::processor_runs("amx_emulated")) std::printf("amx_emulated;");
}
