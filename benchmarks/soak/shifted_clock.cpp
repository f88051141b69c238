// A library for LD_PRELOAD: the clocks of a process read the time plus a shift,
// which may change while it runs.
//
// QUIRE_SHIFTED_CLOCK names a file of two int64: nanoseconds to add to the wall
// clock, and to the monotonic ones. What waits until a time has that time
// shifted back, because the kernel knows nothing of all this. Linux. Next to
// read: clocks.py, which builds and uses it.
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1000000000;
const int64_t kNone[2] = {0, 0};

const volatile int64_t *shifts() {
  static const volatile int64_t *const found = [] {
    const char *path = getenv("QUIRE_SHIFTED_CLOCK");
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *memory =
        file < 0 ? MAP_FAILED
                 : mmap(nullptr, sizeof kNone, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
      close(file);
    return memory == MAP_FAILED ? kNone : static_cast<const int64_t *>(memory);
  }();
  return found;
}

int64_t shift_of(clockid_t clock) {
  switch (clock) {
  case CLOCK_REALTIME:
  case CLOCK_REALTIME_COARSE:
    return shifts()[0];
  case CLOCK_MONOTONIC:
  case CLOCK_MONOTONIC_RAW:
  case CLOCK_MONOTONIC_COARSE:
  case CLOCK_BOOTTIME:
    return shifts()[1];
  default:
    return 0; // processor time
  }
}

timespec plus(const timespec &time, int64_t shift_ns) {
  int64_t nanoseconds = time.tv_sec * kSecond + time.tv_nsec + shift_ns;
  if (nanoseconds < 0)
    nanoseconds = 0;
  return {static_cast<time_t>(nanoseconds / kSecond),
          static_cast<long>(nanoseconds % kSecond)};
}

// A condition does not say which clock it was made for; no machine has been up
// for thirty years.
timespec real_deadline(const timespec &until) {
  return plus(until, -shifts()[until.tv_sec > 1000000000 ? 0 : 1]);
}

template <typename Function> Function next(const char *name) {
  void *found = dlvsym(
      RTLD_NEXT, name,
      "GLIBC_2.3.2"); // of pthread_cond_timedwait there is an older one too
  return reinterpret_cast<Function>(found ? found : dlsym(RTLD_NEXT, name));
}

} // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *out) noexcept {
  if (syscall(SYS_clock_gettime, clock, out) != 0)
    return -1;
  *out = plus(*out, shift_of(clock));
  return 0;
}

int gettimeofday(timeval *__restrict out, void *__restrict) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *out = {now.tv_sec, static_cast<suseconds_t>(now.tv_nsec / 1000)};
  return 0;
}

time_t time(time_t *out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out)
    *out = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *__restrict condition,
                           pthread_mutex_t *__restrict mutex,
                           const timespec *__restrict until) {
  static const auto real =
      next<int (*)(pthread_cond_t *, pthread_mutex_t *, const timespec *)>(
          __func__);
  const timespec deadline = real_deadline(*until);
  return real(condition, mutex, &deadline);
}

int pthread_cond_clockwait(pthread_cond_t *__restrict condition,
                           pthread_mutex_t *__restrict mutex, clockid_t clock,
                           const timespec *__restrict until) {
  static const auto real = next<int (*)(pthread_cond_t *, pthread_mutex_t *,
                                        clockid_t, const timespec *)>(__func__);
  const timespec deadline = plus(*until, -shift_of(clock));
  return real(condition, mutex, clock, &deadline);
}

int sem_timedwait(sem_t *__restrict semaphore,
                  const timespec *__restrict until) {
  static const auto real = next<int (*)(sem_t *, const timespec *)>(__func__);
  const timespec deadline = real_deadline(*until);
  return real(semaphore, &deadline);
}

int sem_clockwait(sem_t *__restrict semaphore, clockid_t clock,
                  const timespec *__restrict until) {
  static const auto real =
      next<int (*)(sem_t *, clockid_t, const timespec *)>(__func__);
  const timespec deadline = plus(*until, -shift_of(clock));
  return real(semaphore, clock, &deadline);
}

int clock_nanosleep(clockid_t clock, int flags, const timespec *until,
                    timespec *left) {
  static const auto real =
      next<int (*)(clockid_t, int, const timespec *, timespec *)>(__func__);
  const timespec deadline =
      flags & TIMER_ABSTIME ? plus(*until, -shift_of(clock)) : *until;
  return real(clock, flags, &deadline, left);
}

} // extern "C"
