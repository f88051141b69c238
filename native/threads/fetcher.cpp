#include "threads/fetcher.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace quire {
namespace {

constexpr int kFetchThreads = 4;              // a disk serves several reads at a time
constexpr uintptr_t kFetchedBytes = 2 << 20;  // a huge page, which is read at once where files have them
constexpr uintptr_t kSmallPage = 4096;        // the smallest of any system: larger pages are touched several times

std::atomic<uint64_t> bytes_wanted = 0;

struct Missing {
  uintptr_t begin, end;
};

void touch(const Missing& next) {
  for (uintptr_t at = next.begin; at < next.end; at = (at / kSmallPage + 1) * kSmallPage) {
    [[maybe_unused]] const char byte = *reinterpret_cast<const volatile char*>(at);
  }
}

}  // namespace

// Outlives the fetcher for as long as a thread runs: threads are detached.
struct Fetcher::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Missing> missing;
  int num_busy = 0;
  bool stop = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stop || !missing.empty(); });
      if (stop) return;
      const Missing next = missing.front();
      missing.pop_front();
      ++num_busy;
      lock.unlock();
      touch(next);
      lock.lock();
      if (--num_busy == 0) changed.notify_all();
    }
  }
};

Fetcher::~Fetcher() {
  if (!shared_ || owner_process_ != getpid()) return;
  finish();
  const std::scoped_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->changed.notify_all();
}

void Fetcher::start() {
  owner_process_ = getpid();
  shared_ = std::make_shared<Shared>();
  // Signals are Python's main thread's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < kFetchThreads; ++i) std::thread([shared = shared_] { shared->run(); }).detach();
  } catch (const std::system_error&) {
    // Ops read what fewer threads, or none, have not fetched.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

uint64_t Fetcher::num_bytes_wanted() { return bytes_wanted; }

void Fetcher::fetch(const std::byte* begin, int64_t num_bytes) {
  bytes_wanted += static_cast<uint64_t>(num_bytes);
  if (!shared_ || owner_process_ != getpid()) start();
  const auto first = reinterpret_cast<uintptr_t>(begin), end = first + static_cast<uintptr_t>(num_bytes);
  const std::scoped_lock lock(shared_->mutex);
  for (uintptr_t at = first; at < end;) {
    const uintptr_t next = (at / kFetchedBytes + 1) * kFetchedBytes, stop = next < end ? next : end;
    shared_->missing.push_back({at, stop});
    at = stop;
  }
  shared_->changed.notify_all();
}

void Fetcher::drop() {
  if (!shared_ || owner_process_ != getpid()) return;
  const std::scoped_lock lock(shared_->mutex);
  shared_->missing.clear();
}

void Fetcher::finish() {
  if (!shared_ || owner_process_ != getpid()) return;
  std::unique_lock lock(shared_->mutex);
  shared_->missing.clear();
  shared_->changed.wait(lock, [this] { return shared_->num_busy == 0; });
}

}  // namespace quire
