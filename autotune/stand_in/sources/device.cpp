// The fake device: memory is reserved, never touched, and charged to this process; what the host copied in is known.
#include "device.h"

#include <cuda.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>

namespace fake {
namespace {
std::mutex lock;
std::map<uintptr_t, Region> regions;  // by address
std::map<uintptr_t, size_t> known;    // device addresses whose content was copied from the host
Process* self = nullptr;
bool contexts[kMaxDevices];
std::atomic<bool> started{false}, forked{false};
std::atomic<int> staying{0};  // an error that all calls return from now on
thread_local int device_now = 0;

Process* slot() {
  if (self) return self;
  each_process([](Process&) {});  // frees the slots of the dead
  for (Process& p : shared()->process) {
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&p.pid, &none, (int32_t)getpid(), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      p.clear();
      p.number = __atomic_add_fetch(&shared()->processes, 1, __ATOMIC_ACQ_REL);
      return self = &p;
    }
  }
  fprintf(stderr, "fakecuda: too many processes\n");
  abort();
}
struct Leave {
  ~Leave() {
    if (self && self->pid == getpid()) {
      self->clear();
      __atomic_store_n(&self->pid, 0, __ATOMIC_RELEASE);
    }
  }
};
Leave leave;

void erase_known(uintptr_t at, size_t size) {
  auto it = known.lower_bound(at);
  if (it != known.begin()) {
    auto before = std::prev(it);
    if (before->first + before->second > at) it = before;
  }
  while (it != known.end() && it->first < at + size) it = known.erase(it);
}
size_t pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }
}  // namespace

thread_local int last_meaning = OTHER;
int current() { return device_now; }
int count() { return (int)visible().size(); }
void set_current(int device) { device_now = device; }

int number_of_process() { return self ? self->number : 0; }

// FAKECUDA_FAULT=CODE@LAUNCHES[#PROCESS]: from this launch on the process (all without a number) has an error that
// stays. In place of a code: hang, and lost, after which no process can use the device.
struct Fault {
  std::string kind;
  long launches = 0;
  int process = 0;
  Fault() {
    std::string text = env("FAKECUDA_FAULT", "");
    size_t at = text.find('@'), number = text.find('#');
    if (at == std::string::npos) return;
    kind = text.substr(0, at);
    launches = atol(text.c_str() + at + 1);
    if (number != std::string::npos) process = atoi(text.c_str() + number + 1);
  }
};
int launched() {
  static const Fault fault;
  static std::atomic<long> launches{0};
  if (fault.kind.empty() || ++launches < fault.launches || staying) return staying;
  if (fault.process && fault.process != number_of_process()) return 0;
  if (fault.kind == "hang")
    for (;;) pause();
  if (fault.kind == "lost") shared()->chips[visible()[device_now]].lost = 1;
  return staying = fault.kind == "lost" ? 999 : atoi(fault.kind.c_str());
}

int begin() {
  if (forked) return 3;
  if (!started.exchange(true))
    pthread_atfork(nullptr, nullptr, [] {
      forked = true;
      self = nullptr;
    });
  return 0;
}

bool charge(int device, int64_t by) {
  Process* p = slot();
  device = visible()[device];
  __atomic_add_fetch(&p->used[device], by, __ATOMIC_ACQ_REL);
  if (by <= 0 || used(device) <= config().memory) return true;
  __atomic_sub_fetch(&p->used[device], by, __ATOMIC_ACQ_REL);
  return false;
}

bool has_context(int device) { return contexts[device]; }

int context(int device) {
  if (int bad = begin()) return bad;
  if (staying) return staying;
  if (device < 0 || device >= count()) return 101;
  std::lock_guard<std::mutex> hold(lock);
  if (!contexts[device]) {
    if (shared()->chips[visible()[device]].lost) return 999;
    if (config().exclusive && used(visible()[device])) return 46;
    if (!charge(device, config().context)) return 2;
    contexts[device] = true;
  }
  return 0;
}

int device_alloc(void** out, size_t size, int device) {
  if (int bad = context(device)) return bad;
  *out = nullptr;
  if (!size) return 0;
  size = pages(size);
  std::lock_guard<std::mutex> hold(lock);
  if (!charge(device, size)) return 2;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    charge(device, -(int64_t)size);
    return 2;
  }
  madvise(at, size, MADV_NOHUGEPAGE);
  madvise(at, size, MADV_DONTDUMP);
  regions[(uintptr_t)at] = {DEVICE, device, (uintptr_t)at, size, size};
  *out = at;
  return 0;
}

int device_free(void* at) {
  if (int bad = begin()) return bad;
  if (!at) return 0;
  std::lock_guard<std::mutex> hold(lock);
  auto it = regions.find((uintptr_t)at);
  if (it == regions.end() || it->second.type != DEVICE) return 1;
  erase_known(it->first, it->second.size);
  munmap(at, it->second.size);
  charge(it->second.device, -(int64_t)it->second.size);
  regions.erase(it);
  return 0;
}

// Managed memory counts as the device's while there is room, as if kernels had touched it there.
int host_alloc(void** out, size_t size, int type) {
  if (int bad = begin()) return bad;
  size = (size + 4095) / 4096 * 4096;
  if (!size) size = 4096;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return 2;
  std::lock_guard<std::mutex> hold(lock);
  size_t charged = type == MANAGED && charge(device_now, pages(size)) ? pages(size) : 0;
  if (charged) slot()->managed[visible()[device_now]] += charged;
  regions[(uintptr_t)at] = {type, device_now, (uintptr_t)at, size, charged};
  *out = at;
  return 0;
}
int host_free(void* at) {
  if (!at) return 0;
  std::lock_guard<std::mutex> hold(lock);
  auto it = regions.find((uintptr_t)at);
  if (it == regions.end()) return 1;
  munmap(at, it->second.size);
  charge(it->second.device, -(int64_t)it->second.charged);
  if (it->second.charged) slot()->managed[visible()[it->second.device]] -= it->second.charged;
  regions.erase(it);
  return 0;
}
void host_register(void* at, size_t size) {
  std::lock_guard<std::mutex> hold(lock);
  regions[(uintptr_t)at] = {HOST, device_now, (uintptr_t)at, size, 0};
}
void host_unregister(void* at) {
  std::lock_guard<std::mutex> hold(lock);
  regions.erase((uintptr_t)at);
}

Region region_at(const void* at) {
  std::lock_guard<std::mutex> hold(lock);
  auto it = regions.upper_bound((uintptr_t)at);
  if (it == regions.begin()) return {};
  --it;
  return (uintptr_t)at < it->first + it->second.size ? it->second : Region{};
}

// Only what the host copied in is ever read back; all else is zero, since no kernel ran. Device pages stay uncommitted.
void copy(void* to, const void* from, size_t size, int kind) {
  if (!size || to == from) return;
  if (kind == ANY) {
    bool source = region_at(from).type == DEVICE, target = region_at(to).type == DEVICE;
    kind = source ? (target ? D2D : D2H) : (target ? H2D : H2H);
  }
  if (kind == H2H) {
    memmove(to, from, size);
    return;
  }
  std::lock_guard<std::mutex> hold(lock);
  auto source = known.find((uintptr_t)from);
  bool real = size <= config().copy_limit && (kind == H2D || (source != known.end() && source->second == size));
  if (kind == D2H) {
    if (size == 1 && last_meaning == ALL)  // even where a byte was copied in before: memory is used again
      memset(to, config().all || config().any_byte, size);
    else if (real)
      memcpy(to, from, size);
    else
      memset(to, size == 1 && config().any_byte, size);
    return;
  }
  if (kind == D2D && size == 1 && last_meaning == COMPARED) last_meaning = ALL;
  erase_known((uintptr_t)to, size);
  if (real) {
    memmove(to, from, size);
    known[(uintptr_t)to] = size;
  }
}
void forget(void* at, size_t size) {
  std::lock_guard<std::mutex> hold(lock);
  erase_known((uintptr_t)at, size);
}

int reserve(uintptr_t* out, size_t size) {
  void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return 2;
  std::lock_guard<std::mutex> hold(lock);
  regions[(uintptr_t)at] = {DEVICE, device_now, (uintptr_t)at, size, 0};
  *out = (uintptr_t)at;
  return 0;
}
void unreserve(uintptr_t at, size_t size) {
  std::lock_guard<std::mutex> hold(lock);
  erase_known(at, size);
  regions.erase(at);
  munmap((void*)at, size);
}
void map(uintptr_t at, size_t size) { mprotect((void*)at, size, PROT_READ | PROT_WRITE); }
void unmap(uintptr_t at, size_t size) {
  std::lock_guard<std::mutex> hold(lock);
  erase_known(at, size);
  madvise((void*)at, size, MADV_DONTNEED);
  mprotect((void*)at, size, PROT_NONE);
}

void memory_info(size_t* free, size_t* total) {
  uint64_t taken = used(visible()[device_now]);
  *total = config().total;
  *free = taken < *total ? *total - taken : 0;
}

int attribute(int number, int device, int* value) {
  const Config& c = config();
  if (device < 0 || device >= count()) return 101;
  bool big = c.cc == 80 || c.cc == 90 || c.cc == 100;  // the data-center chips have more shared memory
  int optin = c.cc >= 90 && big ? 232448 : big ? 166912 : c.cc >= 80 ? 101376 : c.cc == 75 ? 65536 : 98304;
  switch (number) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = optin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = optin + 1024; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1410000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1593000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = c.sms; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 40 << 20; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = c.cc == 75 ? 1024 : big ? 2048 : 1536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = big ? 32 : 16; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = c.cc / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = c.cc % 10; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = visible()[device] + 1; break;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return 0;
}
}  // namespace fake
