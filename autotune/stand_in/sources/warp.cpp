// Time without waiting: preloaded (LD_PRELOAD) into a process and those that it starts, it moves all their clocks on
// where the stand-in's clock would sleep, and has the host compute FAKECUDA_HOST times as fast as it does. Clocks,
// sleeps and time limits of all processes with the same FAKECUDA_STATE agree.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace {

constexpr int64_t kSecond = 1000000000, kLook = 20000000;  // how often in real ns a wait looks at the clock

int64_t ns_of(const timespec& t) { return t.tv_sec * kSecond + t.tv_nsec; }
timespec of_ns(int64_t ns) { return {time_t(ns / kSecond), long(ns % kSecond)}; }

template <typename F>
F* real(const char* name) {
  return (F*)dlsym(RTLD_NEXT, name);
}

int64_t real_now(clockid_t clock) {
  timespec t;
  syscall(SYS_clock_gettime, clock, &t);
  return ns_of(t);
}

struct Shared {
  int64_t skipped;          // ns
  int64_t began, began_at;  // when the first process did: monotonic and of the calendar; 0: not yet
};

Shared* shared() {
  static Shared* const it = [] {
    const char* state = getenv("FAKECUDA_STATE");
    std::string path = std::string(state && *state ? state : "/dev/shm/fakecuda") + ".time";
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) abort();
    auto* found = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) abort();
    int64_t unset = 0, calendar = real_now(CLOCK_REALTIME);
    if (__atomic_compare_exchange_n(&found->began, &unset, real_now(CLOCK_MONOTONIC), false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST))
      __atomic_store_n(&found->began_at, calendar, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&found->began_at, __ATOMIC_SEQ_CST)) {
    }
    return found;
  }();
  return it;
}

double speed() {
  static const double it = [] {
    const char* text = getenv("FAKECUDA_HOST");
    return std::max(1.0, text ? atof(text) : 1.0);
  }();
  return it;
}

bool is_calendar(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int64_t now(clockid_t clock) {
  int64_t time = real_now(clock), since = is_calendar(clock) ? shared()->began_at : shared()->began;
  return since + int64_t((time - since) / speed()) + __atomic_load_n(&shared()->skipped, __ATOMIC_ACQUIRE);
}

// Waits by `look(ns)` of real time until it returns true, or until the clock shows `deadline`: false.
template <typename Look>
bool wait(clockid_t clock, int64_t deadline, Look look) {
  while (true) {
    int64_t left = deadline - now(clock);
    if (look(std::clamp<int64_t>(int64_t(left * speed()), 0, kLook))) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

extern "C" {

void fakecuda_skip(int64_t until) {
  int64_t skipped = __atomic_load_n(&shared()->skipped, __ATOMIC_ACQUIRE);
  while (true) {
    int64_t left = until - now(CLOCK_MONOTONIC);
    if (left <= 0) return;
    if (__atomic_compare_exchange_n(&shared()->skipped, &skipped, skipped + left, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
      return;
  }
}

int clock_gettime(clockid_t clock, timespec* t) noexcept {
  bool is_spent = clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID || clock < 0;
  if (is_spent) {  // by processors
    int failed = syscall(SYS_clock_gettime, clock, t);
    if (!failed) *t = of_ns(int64_t(ns_of(*t) / speed()));
    return failed;
  }
  *t = of_ns(now(clock));
  return 0;
}
int gettimeofday(timeval* t, void*) noexcept {
  int64_t ns = now(CLOCK_REALTIME);
  *t = {time_t(ns / kSecond), suseconds_t(ns % kSecond / 1000)};
  return 0;
}
time_t time(time_t* t) noexcept {
  time_t seconds = now(CLOCK_REALTIME) / kSecond;
  if (t) *t = seconds;
  return seconds;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* wanted, timespec* left) {
  int64_t deadline = ns_of(*wanted) + (flags & TIMER_ABSTIME ? 0 : now(clock));
  bool interrupted = wait(clock, deadline, [](int64_t ns) {
    timespec t = of_ns(ns);
    return syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &t, nullptr) != 0;
  });
  if (interrupted && left && !(flags & TIMER_ABSTIME)) *left = of_ns(std::max<int64_t>(0, deadline - now(clock)));
  return interrupted ? EINTR : 0;
}
int nanosleep(const timespec* wanted, timespec* left) {
  errno = clock_nanosleep(CLOCK_MONOTONIC, 0, wanted, left);
  return errno ? -1 : 0;
}

int poll(pollfd* files, nfds_t count, int ms) {
  static auto* const next = real<decltype(poll)>("poll");
  if (ms <= 0) return next(files, count, ms);
  int found = 0;
  wait(CLOCK_MONOTONIC, now(CLOCK_MONOTONIC) + ms * 1000000ll,
       [&](int64_t ns) { return (found = next(files, count, int((ns + 999999) / 1000000))) != 0; });
  return found;
}
int select(int count, fd_set* reads, fd_set* writes, fd_set* errors, timeval* limit) {
  static auto* const next = real<decltype(select)>("select");
  if (!limit) return next(count, reads, writes, errors, nullptr);
  fd_set none, asked[3];
  FD_ZERO(&none);
  fd_set* sets[] = {reads, writes, errors};
  for (int i = 0; i < 3; ++i) asked[i] = sets[i] ? *sets[i] : none;
  int found = 0;
  wait(CLOCK_MONOTONIC, now(CLOCK_MONOTONIC) + limit->tv_sec * kSecond + limit->tv_usec * 1000, [&](int64_t ns) {
    for (int i = 0; i < 3; ++i)
      if (sets[i]) *sets[i] = asked[i];
    timeval t{0, suseconds_t(ns / 1000)};
    return (found = next(count, reads, writes, errors, &t)) != 0;
  });
  return found;
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* deadline) {
  static auto* const next = real<decltype(sem_clockwait)>("sem_clockwait");
  int failed = 0, why = 0;
  bool ended = wait(clock, ns_of(*deadline), [&](int64_t ns) {
    timespec t = of_ns(real_now(CLOCK_MONOTONIC) + ns);
    failed = next(semaphore, CLOCK_MONOTONIC, &t), why = errno;
    return !failed || why != ETIMEDOUT;
  });
  errno = ended ? why : ETIMEDOUT;
  return ended ? failed : -1;
}
int sem_timedwait(sem_t* semaphore, const timespec* deadline) {
  return sem_clockwait(semaphore, CLOCK_REALTIME, deadline);
}
// Conditions wake for no reason now and then, which all that wait for one expect.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  static auto* const next = real<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
  int64_t left = ns_of(*deadline) - now(clock);
  timespec t = of_ns(real_now(CLOCK_MONOTONIC) + std::clamp<int64_t>(int64_t(left * speed()), 0, kLook));
  int failed = next(condition, mutex, CLOCK_MONOTONIC, &t);
  return failed == ETIMEDOUT && left > 0 ? 0 : failed;
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* deadline) {
  bool calendar = ns_of(*deadline) > now(CLOCK_REALTIME) / 2;  // the machine's uptime is far below
  return pthread_cond_clockwait(condition, mutex, calendar ? CLOCK_REALTIME : CLOCK_MONOTONIC, deadline);
}

}  // extern "C"
