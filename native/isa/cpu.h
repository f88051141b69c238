// Which instruction sets the processor and the operating system offer, whether this build has them or not.
#pragma once
#include <string>

namespace quire {

// The best first. The emulated tiles, which only tests use, are not among them.
inline const char* const kSetsBestFirst[] = {"amx",  "avx512_bf16", "avx512", "avx_vnni",
                                             "avx2", "neon_i8mm",   "neon",   "scalar"};

bool processor_runs(const std::string& isa);

// Why a set that the processor has cannot be used; empty if it can, or if the processor lacks it.
std::string refusal(const std::string& isa);

}  // namespace quire
