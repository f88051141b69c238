#include "weights/bus_error.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace quire {
namespace bus_error {
namespace {

struct sigaction before;  // what the signal does without this
std::atomic_flag is_told = ATOMIC_FLAG_INIT;

// All below runs in the handler: only calls that signal-safety(7) allows, no memory, one line in one write.
constexpr size_t kMostPath = 4096;
const char kStart[] = "quire: ";
const char kEnd[] =
    ": a page of this mapped file cannot be read, because the file was truncated or its disk failed: restore the file, "
    "and start again\n";
char line[sizeof kStart + kMostPath + sizeof kEnd];

uintptr_t read_hex(const char*& at) {
  uintptr_t value = 0;
  for (;; ++at) {
    if (*at >= '0' && *at <= '9') {
      value = value * 16 + static_cast<uintptr_t>(*at - '0');
    } else if (*at >= 'a' && *at <= 'f') {
      value = value * 16 + static_cast<uintptr_t>(*at - 'a' + 10);
    } else {
      return value;
    }
  }
}

// Writes the line if `text`, of /proc/self/maps, is the mapping of a file that holds the address.
bool tell(const char* text, uintptr_t address) {
  const uintptr_t first = read_hex(text);
  if (*text++ != '-' || address < first || address >= read_hex(text)) return false;
  const char* path = std::strchr(text, '/');
  if (path == nullptr) return true;
  size_t length = sizeof kStart - 1;
  std::memcpy(line, kStart, length);
  for (; *path != '\0'; ++path) {
    const bool is_shown = static_cast<unsigned char>(*path) >= ' ' && *path != '\x7f';
    line[length++] = is_shown ? *path : '?';
  }
  std::memcpy(line + length, kEnd, sizeof kEnd - 1);
  length += sizeof kEnd - 1;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, length);  // stderr may be closed
  return true;
}

void tell_of(uintptr_t address) {
  const int maps = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return;
  char text[kMostPath], piece[1024];  // of a longer line the rest is left out
  size_t length = 0;
  bool is_found = false;
  for (ssize_t count; !is_found && (count = ::read(maps, piece, sizeof piece)) > 0;) {
    for (ssize_t at = 0; !is_found && at < count; ++at) {
      if (piece[at] == '\n') {
        text[length] = '\0';
        is_found = tell(text, address);
        length = 0;
      } else if (length < sizeof text - 1) {
        text[length++] = piece[at];
      }
    }
  }
  ::close(maps);
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  if (is_told.test_and_set()) {
    const timespec while_told = {1, 0};  // another thread tells it, and ends the process
    nanosleep(&while_told, nullptr);
    return;
  }
  if (info->si_code == BUS_ADRERR) tell_of(reinterpret_cast<uintptr_t>(info->si_addr));
  sigaction(signal, &before, nullptr);
  if (info->si_code <= 0) raise(signal);  // sent by a process: no instruction comes again
}

}  // namespace
}  // namespace bus_error

void explain_bus_errors() {
  static const bool is_installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = bus_error::on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &bus_error::before) == 0;
  }();
  static_cast<void>(is_installed);
}

}  // namespace quire
