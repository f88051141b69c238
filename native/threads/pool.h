// The engine's own threads: they run a whole step together, meeting at a barrier after each op.
//
// The caller is thread 0. Between steps and in a barrier a thread spins (in a barrier for some 20 µs), then offers its
// core to others, then sleeps: where another process wants the cores, it gets them.
//
// Where the process may use as many CPUs as there are threads, each thread has one of its own while tasks run: woken
// beside a busy server, two of them would often be put on one CPU, and a step is as slow as its slowest thread.
#pragma once
#include <cstdint>
#include <memory>

namespace quire {

class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}
  // Returns when all threads have arrived. What they wrote before is then visible to all.
  void wait();

 private:
  const uint32_t num_threads_;
  // On cache lines of their own: arriving must not disturb waiting threads.
  alignas(128) uint32_t arrived_ = 0;
  alignas(128) uint32_t round_ = 0;
  uint32_t sleepers_ = 0;
};

class ThreadPool {
 public:
  using Task = void (*)(void* argument, int thread, Barrier& barrier);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // Calls task(argument, thread, barrier) on every thread; returns when all are done. Not for several callers at once.
  // After a fork the child's first call starts threads of its own. Denormals are zero while tasks run.
  void run(Task task, void* argument);

 private:
  struct Shared;
  void start();

  const int num_threads_;
  std::shared_ptr<Shared> shared_;
  int owner_process_ = 0;
};

}  // namespace quire
