// Threads that bring weights from a mapped file into memory before ops read them: a thread that computes would wait for
// the disk at each part that is missing, one part after another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace quire {

class Fetcher {
 public:
  Fetcher() = default;
  ~Fetcher();
  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

  // Of all fetchers of this process, the bytes that `fetch` was asked for, in memory already or not.
  static uint64_t num_bytes_wanted();

  // Brings these bytes into memory, after those of earlier calls; returns at once.
  void fetch(const std::byte* begin, int64_t num_bytes);
  // Drops what is not being fetched yet.
  void drop();
  // Drops the rest and waits until no byte is being read: the caller may unmap them.
  void finish();

 private:
  struct Shared;
  void start();

  std::shared_ptr<Shared> shared_;
  int owner_process_ = 0;
};

}  // namespace quire
