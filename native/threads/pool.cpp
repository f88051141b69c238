#include "threads/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "threads/system.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int kSpins = 400;             // about 20 µs of pause instructions
constexpr int kYieldsBeforeSleep = 40;  // then the core is offered this often before sleeping
constexpr int kSpinsBetweenSteps = 2000;
constexpr int kYieldsBetweenSteps = 1000;      // some 0.3 ms, what the host takes between two steps: waking costs 30 us
constexpr int kSleepNanoseconds = 50'000'000;  // a lost wake-up costs this much, not forever

uint32_t read(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

void sleep_while(const uint32_t& word, uint32_t value) { sleep_on(&word, value, kSleepNanoseconds, Sleepers::here); }

void wake_all(const uint32_t& word) { wake_sleepers(&word, INT32_MAX, Sleepers::here); }

// Returns when `word` is no longer `value`.
void wait_while(const uint32_t& word, uint32_t value) {
  for (int i = 0; i < kSpinsBetweenSteps; ++i) {
    if (read(word) != value) return;
    pause_spinning();
  }
  for (int i = 0; i < kYieldsBetweenSteps; ++i) {
    if (read(word) != value) return;
    sched_yield();
  }
  while (read(word) == value) sleep_while(word, value);
}

// Denormals cost a hundred cycles each, and bf16 instructions treat them as zero anyway. ARM's FZ tells whether a
// result is one before it is rounded, x86's FTZ after: they differ in results that round up to the least normal number.
class DenormalsAreZero {
 public:
#if defined(__x86_64__)
  DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  DenormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));  // FZ
  }
  ~DenormalsAreZero() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

}  // namespace

void Barrier::wait() {
  if (num_threads_ == 1) return;
  const uint32_t round = read(round_);
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == num_threads_) {
    __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&round_, round + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST) != 0) wake_all(round_);
    return;
  }
  for (int i = 0; i < kSpins; ++i) {
    if (read(round_) != round) return;
    pause_spinning();
  }
  for (int i = 0; i < kYieldsBeforeSleep; ++i) {
    if (read(round_) != round) return;
    sched_yield();
  }
  __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
  while (read(round_) == round) sleep_while(round_, round);
  __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
}

// Outlives the pool for as long as a thread runs: threads are detached.
struct ThreadPool::Shared {
  explicit Shared(int num_threads) : barrier(num_threads), cores(num_threads) {}
  Barrier barrier;
  const Cores cores;
  Task task = nullptr;
  void* argument = nullptr;
  bool stop = false;
  alignas(128) uint32_t step = 0;  // changes when there is work, or when the pool ends
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}

ThreadPool::~ThreadPool() {
  if (!shared_ || owner_process_ != getpid()) return;
  shared_->stop = true;
  __atomic_add_fetch(&shared_->step, 1, __ATOMIC_RELEASE);
  wake_all(shared_->step);
}

void ThreadPool::start() {
  owner_process_ = getpid();
  shared_ = std::make_shared<Shared>(num_threads_);
  struct Start {
    std::shared_ptr<Shared> shared;
    int thread;
  };
  // Signals are Python's main thread's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = 0;
  for (int thread = 1; thread < num_threads_ && failed == 0; ++thread) {
    auto* argument = new Start{shared_, thread};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t unused;
    failed = pthread_create(
        &unused, &attributes,
        [](void* raw) -> void* {
          const std::unique_ptr<Start> begin(static_cast<Start*>(raw));
          Shared& shared = *begin->shared;
          const DenormalsAreZero mode;
          for (uint32_t seen = 0;;) {
            wait_while(shared.step, seen);
            seen = read(shared.step);
            if (shared.stop) return nullptr;
            shared.cores.settle(begin->thread);
            shared.task(shared.argument, begin->thread, shared.barrier);
            shared.barrier.wait();
          }
        },
        argument);
    pthread_attr_destroy(&attributes);
    if (failed != 0) delete argument;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failed != 0) throw std::runtime_error("no more threads can be started: " + std::to_string(failed));
}

void ThreadPool::run(Task task, void* argument) {
  if (!shared_ || owner_process_ != getpid()) start();
  Shared& shared = *shared_;
  shared.task = task;
  shared.argument = argument;
  shared.cores.settle(0);
  if (num_threads_ > 1) {
    __atomic_add_fetch(&shared.step, 1, __ATOMIC_SEQ_CST);
    wake_all(shared.step);
  }
  const DenormalsAreZero mode;
  task(argument, 0, shared.barrier);
  shared.barrier.wait();
}

}  // namespace quire
