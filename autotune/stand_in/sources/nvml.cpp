// libnvidia-ml.so.1: a GPU whose memory is what the processes on the fake device hold; idle and cool without the clock.
#include <cuda.h>
#include <time.h>

#include "clock.h"

using namespace fake;
typedef int Ret;
enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };
typedef void* Device;
#define API extern "C" __attribute__((visibility("default"))) Ret
#define DEVICE                                        \
  int d = (int)(uintptr_t)device - 1;                 \
  if (d < 0 || d >= config().devices) return INVALID; \
  if (shared()->chips[d].lost) return LOST;           \
  const Chip& chip = shared()->chips[d];              \
  (void)chip
static constexpr uint64_t kFirmware = 600ull << 20;  // NVML's total is more than CUDA's by this

API nvmlInit_v2() { return SUCCESS; }
API nvmlInit() { return SUCCESS; }
API nvmlInitWithFlags(unsigned) { return SUCCESS; }
API nvmlShutdown() { return SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char* nvmlErrorString(Ret r) {
  switch (r) {
    case 0: return "Success";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
  }
}
static Ret text(char* out, unsigned n, const std::string& s) {
  if (s.size() + 1 > n) return TOO_SMALL;
  memcpy(out, s.c_str(), s.size() + 1);
  return SUCCESS;
}
API nvmlSystemGetDriverVersion(char* out, unsigned n) { return text(out, n, "580.82.07"); }
API nvmlSystemGetNVMLVersion(char* out, unsigned n) { return text(out, n, "13.580.82.07"); }
API nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = CUDA_VERSION;
  return SUCCESS;
}
API nvmlSystemGetCudaDriverVersion(int* v) {
  *v = CUDA_VERSION;
  return SUCCESS;
}
API nvmlDeviceGetCount_v2(unsigned* n) {
  *n = config().devices;
  return SUCCESS;
}
API nvmlDeviceGetCount(unsigned* n) {
  *n = config().devices;
  return SUCCESS;
}
API nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* out) {
  if ((int)i >= config().devices) return INVALID;
  *out = (Device)(uintptr_t)(i + 1);
  return SUCCESS;
}
static std::string bus(int d) {
  char s[32];
  snprintf(s, sizeof s, "00000000:%02X:00.0", d + 1);
  return s;
}
API nvmlDeviceGetHandleByUUID(const char* s, Device* out) {
  for (int d = 0; d < config().devices; ++d)
    if (uuid(d) == s) {
      *out = (Device)(uintptr_t)(d + 1);
      return SUCCESS;
    }
  return NOT_FOUND;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char* s, Device* out) {
  for (int d = 0; d < config().devices; ++d)
    if (strcasestr(bus(d).c_str(), s)) {
      *out = (Device)(uintptr_t)(d + 1);
      return SUCCESS;
    }
  return NOT_FOUND;
}
API nvmlDeviceGetIndex(Device device, unsigned* i) {
  DEVICE;
  *i = d;
  return SUCCESS;
}
API nvmlDeviceGetUUID(Device device, char* out, unsigned n) {
  DEVICE;
  return text(out, n, uuid(d));
}
API nvmlDeviceGetName(Device device, char* out, unsigned n) {
  DEVICE;
  return text(out, n, config().name);
}
struct Memory {
  unsigned long long total, free, used;
};
struct Memory2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
API nvmlDeviceGetMemoryInfo(Device device, Memory* m) {
  DEVICE;
  m->total = config().total + kFirmware;
  m->used = used(d) + kFirmware;
  m->free = m->total - std::min(m->total, m->used);
  return SUCCESS;
}
API nvmlDeviceGetMemoryInfo_v2(Device device, Memory2* m) {
  DEVICE;
  m->total = config().total + kFirmware;
  m->reserved = kFirmware;
  m->used = used(d);
  m->free = config().total - std::min(config().total, used(d));
  return SUCCESS;
}
struct RunningV1 {  // of the name without a version, which torch asks by
  unsigned pid;
  unsigned long long used;
};
struct Running : RunningV1 {
  unsigned gpu = 0xffffffff, compute = 0xffffffff;
};
template <class Each>
int running(Device device, unsigned* n, Each* out) {
  DEVICE;
  std::vector<Each> found;
  each_process([&](Process& p) {
    if (!p.used[d]) return;
    Each each{};
    each.pid = (unsigned)p.pid, each.used = p.used[d] - p.managed[d];  // as the driver does
    found.push_back(each);
  });
  unsigned room = *n;
  *n = found.size();
  if (found.empty()) return SUCCESS;
  if (room < found.size() || !out) return TOO_SMALL;
  std::copy(found.begin(), found.end(), out);
  return SUCCESS;
}
API nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* n, Running* out) {
  return running(device, n, out);
}
API nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned* n, Running*) {
  DEVICE;
  *n = 0;
  return SUCCESS;
}
struct Rates {
  unsigned gpu, memory;
};
API nvmlDeviceGetUtilizationRates(Device device, Rates* r) {
  DEVICE;
  if (config().mig) return UNSUPPORTED;
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  // Of the latest sixth of a second, as the driver has it.
  bool is_busy = t.tv_sec * 1000000000ll + t.tv_nsec < chip.seen + 166000000;
  *r = {is_busy ? 100u : 0u, is_busy ? 50u : 0u};
  return SUCCESS;
}
API nvmlDeviceGetClockInfo(Device device, unsigned kind, unsigned* mhz) {
  DEVICE;
  const Disturbances& it = disturbances();
  double slower = (1 + it.ramp * (1 - chip.warm)) * (1 + it.drift * chip.heat) * (1 + it.cap);
  *mhz = kind == 2 ? 1593 : unsigned(1410 / slower);
  return SUCCESS;
}
API nvmlDeviceGetMaxClockInfo(Device device, unsigned kind, unsigned* mhz) {
  DEVICE;
  *mhz = kind == 2 ? 1593 : 1410;
  return SUCCESS;
}
API nvmlDeviceGetTemperature(Device device, unsigned, unsigned* c) {
  DEVICE;
  *c = 40 + unsigned(40 * chip.heat);
  return SUCCESS;
}
API nvmlDeviceGetPowerUsage(Device device, unsigned* mw) {
  DEVICE;
  *mw = 60000;
  return SUCCESS;
}
API nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned* mw) {
  DEVICE;
  *mw = 400000;
  return SUCCESS;
}
API nvmlDeviceGetPowerManagementLimit(Device device, unsigned* mw) {
  DEVICE;
  *mw = 400000;
  return SUCCESS;
}
API nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long* r) {
  DEVICE;
  *r = disturbances().cap ? 4 : 0;  // the software's power cap
  return SUCCESS;
}
API nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long* r) {
  return nvmlDeviceGetCurrentClocksEventReasons(device, r);
}
API nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  DEVICE;
  *major = config().cc / 10;
  *minor = config().cc % 10;
  return SUCCESS;
}
API nvmlDeviceGetMigMode(Device device, unsigned* now, unsigned* pending) {
  DEVICE;
  if (!config().mig) return UNSUPPORTED;
  *now = *pending = 1;
  return SUCCESS;
}
API nvmlDeviceGetPersistenceMode(Device device, unsigned* m) {
  DEVICE;
  *m = 1;
  return SUCCESS;
}
API nvmlDeviceGetComputeMode(Device device, unsigned* m) {
  DEVICE;
  *m = config().exclusive ? 3 : 0;  // exclusive process
  return SUCCESS;
}
API nvmlDeviceGetMultiGpuBoard(Device device, unsigned* m) {
  DEVICE;
  *m = 0;
  return SUCCESS;
}
API nvmlDeviceGetP2PStatus(Device device, Device, unsigned, unsigned* s) {
  DEVICE;
  *s = 3;
  return SUCCESS;
}
struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char name[32];
};
API nvmlDeviceGetPciInfo_v3(Device device, Pci* p) {
  DEVICE;
  memset(p, 0, sizeof *p);
  p->bus = d + 1;
  p->id = 0x20b210de;
  snprintf(p->legacy, 16, "%.15s", bus(d).c_str() + 4);
  snprintf(p->name, 32, "%s", bus(d).c_str());
  return SUCCESS;
}
// torch asks for these by name when it reports "out of memory".
API nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned, unsigned*) {
  DEVICE;
  return UNSUPPORTED;
}
API nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned, Pci*) {
  DEVICE;
  return UNSUPPORTED;
}
struct Fabric {
  unsigned version;
  unsigned char cluster[16];
  unsigned status, clique;
  unsigned char state;
};
API nvmlDeviceGetGpuFabricInfoV(Device device, Fabric* fabric) {
  DEVICE;
  fabric->state = 0;  // there is none
  return SUCCESS;
}
API nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* n, RunningV1* out) { return running(device, n, out); }
