// What all libraries of the stand-in share: the configuration (environment variables), and how much of each device's
// memory every live process holds (a file that they map).
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace fake {

constexpr int kMaxDevices = 64, kMaxProcesses = 1024;

struct Process {
  int32_t pid;
  int32_t number;                                    // in the order in which processes began to use devices, from 1
  uint64_t used[kMaxDevices], managed[kMaxDevices];  // the second is part of the first
  void clear() { memset(used, 0, sizeof used), memset(managed, 0, sizeof managed); }
};
// What the clock knows of a device: until when it computes, when it last did, and how warm and how hot it is (0 to 1).
struct Chip {
  int64_t busy_until, seen;
  double warm, heat;
  int32_t lost, pad;  // lost: it fell off the bus
};
struct Shared {
  Process process[kMaxProcesses];
  Chip chips[kMaxDevices];
  int32_t processes, pad;
};

// A size such as 24GiB, 450MiB or 1000000.
inline uint64_t bytes(const char* text, uint64_t fallback) {
  if (!text || !*text) return fallback;
  char* end;
  double value = strtod(text, &end);
  switch (*end | 32) {
    case 'k': return uint64_t(value * (1ull << 10));
    case 'm': return uint64_t(value * (1ull << 20));
    case 'g': return uint64_t(value * (1ull << 30));
    case 't': return uint64_t(value * (1ull << 40));
    default: return uint64_t(value);
  }
}

inline const char* env(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value && *value ? value : fallback;
}

struct Config {
  uint64_t memory = bytes(getenv("FAKECUDA_MEMORY"), 80ull << 30) & ~0x1fffffull;  // of each device
  uint64_t total = bytes(getenv("FAKECUDA_TOTAL"), memory);                        // of which programs are told
  uint64_t context = bytes(getenv("FAKECUDA_CONTEXT"), 450ull << 20);              // what a context takes of it
  uint64_t copy_limit = bytes(getenv("FAKECUDA_COPY"), 16ull << 20);               // larger copies are skipped
  int devices = atoi(env("FAKECUDA_DEVICES", "1"));
  int sms = atoi(env("FAKECUDA_SMS", "108"));
  int cc = int(atof(env("FAKECUDA_CC", "8.0")) * 10 + 0.5);  // 80: an A100
  int any_byte = atoi(env("FAKECUDA_BOOL", "0"));            // what an unknown byte reads as
  int all = atoi(env("FAKECUDA_ALL", "1"));                  // what all() reads as
  int exclusive = atoi(env("FAKECUDA_EXCLUSIVE", "0"));      // one process may use a device at a time
  int mig = atoi(env("FAKECUDA_MIG", "0"));                  // devices are slices, of which NVML tells less
  std::string name = env("FAKECUDA_NAME", "NVIDIA A100-SXM4-80GB");
  Config() {
    if (devices < 0) devices = 0;
    if (devices > kMaxDevices) devices = kMaxDevices;
  }
};

inline const Config& config() {
  static const Config it;
  return it;
}

inline Shared* shared() {
  static Shared* it = [] {
    std::string path = env("FAKECUDA_STATE", "/dev/shm/fakecuda");
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, sizeof(Shared))) {
      perror(path.c_str());
      abort();
    }
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return static_cast<Shared*>(at);
  }();
  return it;
}

// A process that was killed holds nothing any more, even while nobody has waited for it.
inline bool alive(int pid) {
  char path[64], line[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ssize_t n = read(fd, line, sizeof line - 1);
  close(fd);
  if (n <= 0) return false;
  line[n] = 0;
  const char* state = strrchr(line, ')');
  return state && state[2] != 'Z' && state[2] != 'X';
}

template <class F>
void each_process(F visit) {
  for (Process& p : shared()->process) {
    int32_t pid = __atomic_load_n(&p.pid, __ATOMIC_ACQUIRE);
    if (!pid) continue;
    if (pid != getpid() && !alive(pid)) {
      p.clear();
      __atomic_compare_exchange_n(&p.pid, &pid, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
      continue;
    }
    visit(p);
  }
}

// What all processes hold of a device, in bytes.
inline uint64_t used(int device) {
  uint64_t sum = 0;
  each_process([&](Process& p) { sum += p.used[device]; });
  return sum;
}

inline void uuid_bytes(int device, unsigned char out[16]) {
  for (int i = 0; i < 16; ++i) out[i] = (unsigned char)(0xfa + 7 * i);
  out[15] = (unsigned char)device;
}

inline std::string uuid(int d) {
  unsigned char b[16];
  uuid_bytes(d, b);
  std::string s = "GPU-";
  char hex[4];
  for (int i = 0; i < 16; ++i) {
    snprintf(hex, sizeof hex, "%02x", b[i]);
    s += hex;
    if (i == 3 || i == 5 || i == 7 || i == 9) s += '-';
  }
  return s;
}

// The devices that CUDA_VISIBLE_DEVICES leaves to CUDA (NVML sees all), by their numbers.
inline const std::vector<int>& visible() {
  static const std::vector<int> it = [] {
    std::vector<int> found;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int d = 0; d < config().devices; ++d) found.push_back(d);
      return found;
    }
    std::string entries = text;
    for (size_t at = 0; at < entries.size();) {
      size_t end = std::min(entries.find(',', at), entries.size());
      std::string entry = entries.substr(at, end - at);
      at = end + 1;
      int device = -1;
      if (!entry.compare(0, 4, "GPU-")) {
        for (int d = 0; d < config().devices; ++d)
          if (!uuid(d).compare(0, entry.size(), entry)) device = d;
      } else if (!entry.empty())
        device = atoi(entry.c_str());
      if (device < 0 || device >= config().devices) break;  // what follows a wrong one isn't seen
      found.push_back(device);
    }
    return found;
  }();
  return it;
}

}  // namespace fake
