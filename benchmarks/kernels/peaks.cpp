// What one thread of this machine can do: multiply-adds per second on registers, and bytes per second from memory.
// Compiled by peaks.py with -march=native; prints a line of JSON.
#include <sys/mman.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kRounds = 200000, kRepeats = 9, kBytes = int64_t{1} << 28;

double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// The shortest of several runs, in seconds.
template <typename Work>
double shortest(Work work) {
  double best = 1e9;
  for (int64_t i = 0; i < kRepeats; ++i) {
    const double start = now();
    work();
    const double taken = now() - start;
    if (taken < best) best = taken;
  }
  return best;
}

// Twelve independent sums hide the latency of any of these instructions.
#define QUIRE_PEAK(name, Vector, zero, instruction)                         \
  double name() {                                                           \
    return shortest([] {                                                    \
      Vector sums[12], a = zero, b = zero;                                  \
      asm volatile("" : "+v"(a), "+v"(b));                                  \
      _Pragma("GCC unroll 12") for (int k = 0; k < 12; ++k) sums[k] = zero; \
      for (int64_t i = 0; i < kRounds; ++i) {                               \
        _Pragma("GCC unroll 12") for (int k = 0; k < 12; ++k) {             \
          sums[k] = instruction;                                            \
          asm volatile("" : "+v"(sums[k]));                                 \
        }                                                                   \
      }                                                                     \
    });                                                                     \
  }

#if defined(__AVX512F__)
constexpr int kFloats = 16;
QUIRE_PEAK(fma_seconds, __m512, _mm512_setzero_ps(), _mm512_fmadd_ps(a, b, sums[k]))
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kFloats = 8;
QUIRE_PEAK(fma_seconds, __m256, _mm256_setzero_ps(), _mm256_fmadd_ps(a, b, sums[k]))
#else
constexpr int kFloats = 0;
double fma_seconds() { return 1.0; }
#endif
#if defined(__AVX512BF16__)
constexpr int kPairs = 32;
QUIRE_PEAK(bf16_seconds, __m512, _mm512_setzero_ps(), _mm512_dpbf16_ps(sums[k], (__m512bh)a, (__m512bh)b))
#else
constexpr int kPairs = 0;
double bf16_seconds() { return 1.0; }
#endif
#if defined(__AVX512VNNI__)
constexpr int kQuads = 64;
QUIRE_PEAK(int8_seconds, __m512i, _mm512_setzero_si512(), _mm512_dpbusd_epi32(sums[k], a, b))
#else
constexpr int kQuads = 0;
double int8_seconds() { return 1.0; }
#endif

// A plain sum of 256 MiB, far more than any cache, in two streams.
double read_seconds() {
  auto* data = static_cast<uint64_t*>(aligned_alloc(size_t{1} << 21, kBytes));
  madvise(data, kBytes, MADV_HUGEPAGE);  // as the engine's weights and NumPy's arrays; 4 KiB pages cost a third
  memset(data, 1, kBytes);
  const double seconds = shortest([data] {
    using Line = uint64_t __attribute__((vector_size(64)));
    constexpr int64_t kHalf = kBytes / 2 / int64_t{sizeof(Line)};
    const auto* lines = reinterpret_cast<const Line*>(data);
    Line sums[2] = {};
    for (int64_t i = 0; i < kHalf; ++i) {
      for (int64_t half = 0; half < 2; ++half) {
        __builtin_prefetch(lines + half * kHalf + i + 64);
        sums[half] += lines[half * kHalf + i];
      }
    }
    for (int k = 0; k < 8; ++k) asm volatile("" : : "r"(sums[0][k]), "r"(sums[1][k]));
  });
  free(data);
  return seconds;
}

}  // namespace

int main() {
  const double steps = static_cast<double>(kRounds) * 12 * 1e-9;
  printf("{\"fma_gmacs\": %.1f, \"bf16_gmacs\": %.1f, \"int8_gmacs\": %.1f, \"read_gbs\": %.1f}\n",
         steps * kFloats / fma_seconds(), steps * kPairs / bf16_seconds(), steps * kQuads / int8_seconds(),
         static_cast<double>(kBytes) * 1e-9 / read_seconds());
}
