// The times of streams, and of products by their shapes.
#include "clock.h"

#include <time.h>

#include <cmath>
#include <map>
#include <mutex>

#include "device.h"

namespace fake {
namespace {

struct Timeline {
  int64_t end = 0;
  bool is_captured = false;
  double sum = 0;
};
std::mutex lock;
std::map<void*, Timeline> timelines;
// Ends of what was launched last: the host may be so many launches ahead.
constexpr size_t kQueue = 1024;
int64_t queue[kQueue];
size_t next_in_queue = 0;

// Each device's default stream is another.
Timeline& timeline(void* stream) {
  return timelines[(uintptr_t)stream > 2 ? stream : (void*)(uintptr_t)(16 + current())];
}

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
// A draw from the normal distribution, the same for the same numbers.
double normal(uint64_t kind, uint64_t number) {
  uint64_t first = mixed(mixed(kind * 1000003 + uint64_t(disturbances().seed)) + number), second = mixed(first);
  double u = (double(first >> 11) + 1) / 9007199254740993.0, v = double(second >> 11) / 9007199254740992.0;
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
}

// Whether this process began to use devices before all others that do so now; looked at each tenth of a second.
bool is_oldest(int64_t tenth) {
  static int64_t looked = -1;
  static bool oldest = false;
  if (looked != tenth) {
    int others = 0, older = 0;
    each_process([&](Process& p) {
      if (p.pid == getpid()) return;
      ++others;
      older += p.number < number_of_process();
    });
    looked = tenth;
    oldest = others && !older;
  }
  return oldest;
}

// How many times as long as in quiet a kernel takes that begins at `from`.
double slowness(Chip& chip, int64_t from) {
  const Disturbances& d = disturbances();
  double idle = from > chip.seen ? (from - chip.seen) / 1e9 : 0;
  if (idle > 0.01) {
    chip.warm *= std::exp(-idle / 10);
    chip.heat *= std::exp(-idle / 60);
  }
  int64_t tenth = from / 100000000;
  static int64_t drawn = -1;
  static double luck = 1;
  if (drawn != tenth) {
    luck = std::exp(d.noise * normal(1, tenth) + d.process * normal(2, number_of_process()));
    drawn = tenth;
  }
  double slower = luck * (1 + d.ramp * (1 - chip.warm)) * (1 + d.drift * chip.heat) * (1 + d.cap);
  return d.first && is_oldest(tenth) ? slower * (1 + d.first) : slower;
}

// The chip computes for one stream at a time, whichever process it is of.
int64_t occupy(int64_t from, double ns) {
  Chip& chip = shared()->chips[visible()[current()]];
  int64_t busy = __atomic_load_n(&chip.busy_until, __ATOMIC_ACQUIRE), end;
  do {
    end = std::max(from, busy) + int64_t(ns * slowness(chip, std::max(from, busy)));
  } while (!__atomic_compare_exchange_n(&chip.busy_until, &busy, end, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  double seconds = ns / 1e9;
  chip.warm += (1 - chip.warm) * std::min(1.0, seconds / 2);
  chip.heat += (1 - chip.heat) * std::min(1.0, seconds / 60);
  chip.seen = end;
  return end;
}

void add(void* stream, double ns, bool computes) {
  if (!disturbances().on) return;
  std::unique_lock<std::mutex> hold(lock);
  Timeline& it = timeline(stream);
  if (it.is_captured) {
    it.sum += ns;
    return;
  }
  int64_t from = std::max(now(), it.end);
  it.end = computes ? occupy(from, ns) : from + int64_t(ns);
  std::swap(queue[next_in_queue], from);  // the end that the queue forgets
  queue[next_in_queue] = it.end;
  next_in_queue = (next_in_queue + 1) % kQueue;
  hold.unlock();
  sleep_until(from);
}

}  // namespace

const Speed& speed() {
  static const Speed it = [] {
    const std::string& name = config().name;
    auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (is("H100") || is("H200")) return Speed{650, 330, 50, is("H200") ? 4000.0 : 2800.0, 40, 300};
    if (is("L4")) return Speed{60, 30, 20, 240, 12, 12};
    if (is("4090")) return Speed{140, 70, 60, 850, 20, 12};
    if (is("3090")) return Speed{60, 30, 25, 780, 12, 12};
    if (is("T4")) return Speed{40, 6, 6, 250, 6, 6};
    return Speed{230, 110, 16, 1600, 20, 200};  // A100
  }();
  return it;
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
void sleep_until(int64_t ns) {
  if (ns <= now()) return;
  if (fakecuda_skip) return fakecuda_skip(ns);
  timespec t{time_t(ns / 1000000000), long(ns % 1000000000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr)) {
  }
}
void work(void* stream, double ns) { add(stream, ns, true); }
void transfer(void* stream, double ns) { add(stream, ns, false); }
int64_t end_of(void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  return timeline(stream).end;
}
int64_t end_of_all() {
  std::lock_guard<std::mutex> hold(lock);
  int64_t end = 0;
  for (auto& it : timelines) end = std::max(end, it.second.end);
  return end;
}
void not_before(void* stream, int64_t ns) {
  std::lock_guard<std::mutex> hold(lock);
  Timeline& it = timeline(stream);
  if (!it.is_captured) it.end = std::max(it.end, ns);
}
void capture(void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  timeline(stream).is_captured = true;
  timeline(stream).sum = 0;
}
double captured(void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  timeline(stream).is_captured = false;
  return timeline(stream).sum;
}
void forget_stream(void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  timelines.erase(stream);
}

// Tiles of 128 x 128 share the multiprocessors; a short sum hardly fills them. Never faster than its matrices are read.
double product_ns(double m, double n, double k, double batch, int bytes, bool tf32) {
  double rate = bytes <= 2 ? speed().half : tf32 ? speed().tf32 : speed().single;
  double tiles = std::ceil(m / 128) * std::ceil(n / 128) * batch;
  rate *= std::min(1.0, tiles / config().sms) * k / (k + 128);
  double moved = (m * k + k * n + m * n) * batch * bytes;
  return 2500 + std::max(2 * m * n * k * batch / rate / 1000, moved / speed().bandwidth);
}

}  // namespace fake

#define VISIBLE extern "C" __attribute__((visibility("default")))
VISIBLE void fakecuda_work(void* stream, double ns) { fake::work(stream, ns); }
VISIBLE void fakecuda_product(void* stream, double m, double n, double k, double batch, int bytes, int tf32) {
  fake::work(stream, fake::product_ns(m, n, k, batch, bytes, tf32));
}
VISIBLE void fakecuda_message(void* stream, double bytes) {
  fake::transfer(stream, 20000 + bytes / fake::speed().link);
}
