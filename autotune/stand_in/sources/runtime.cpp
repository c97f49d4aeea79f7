// libcudart: errors, devices and memory. streams.cpp, graphs.cpp and launches.cpp are the rest of what torch and
// bitsandbytes link.
#include "runtime.h"

#include <cuda.h>

#include <map>
#include <mutex>

using namespace fake;
thread_local cudaError_t last_error = cudaSuccess;

// Names and errors.
API cudaGetLastError() {
  cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
API cudaPeekAtLastError() { return last_error; }
static const struct {
  int code;
  const char *name, *text;
} kErrors[] = {{0, "cudaSuccess", "no error"},
               {1, "cudaErrorInvalidValue", "invalid argument"},
               {2, "cudaErrorMemoryAllocation", "out of memory"},
               {3, "cudaErrorInitializationError", "initialization error"},
               {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
               {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
               {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
               {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
               {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
               {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
               {600, "cudaErrorNotReady", "device not ready"},
               {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
               {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
               {801, "cudaErrorNotSupported", "operation not supported"},
               {999, "cudaErrorUnknown", "unknown error"}};
VISIBLE(const char*) cudaGetErrorName(cudaError_t e) {
  for (auto& k : kErrors)
    if (k.code == e) return k.name;
  return "cudaErrorUnknown";
}
VISIBLE(const char*) cudaGetErrorString(cudaError_t e) {
  for (auto& k : kErrors)
    if (k.code == e) return k.text;
  return "unknown error";
}
API cudaDriverGetVersion(int* v) {
  *v = CUDA_VERSION;
  return cudaSuccess;
}
API cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
extern "C" CUresult cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
API cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                     cudaDriverEntryPointQueryResult* found) {
  CUdriverProcAddressQueryResult got;
  cuGetProcAddress_v2(name, out, 0, 0, &got);
  if (found) *found = (cudaDriverEntryPointQueryResult)got;
  return cudaSuccess;
}

// Devices.
API cudaGetDeviceCount(int* n) {
  START;
  *n = count();
  return *n ? cudaSuccess : said(cudaErrorNoDevice);
}
API cudaGetDevice(int* d) {
  START;
  *d = current();
  return cudaSuccess;
}
API cudaSetDevice(int d) {
  if (d < 0 || d >= count()) return said(101);
  int bad = context(d);
  if (bad) return said(bad);
  set_current(d);
  return cudaSuccess;
}
API cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  START;
  return said(attribute(a, d, v));
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  START;
  if (d < 0 || d >= count()) return said(101);
  auto get = [d](int a) {
    int v = 0;
    attribute(a, d, &v);
    return v;
  };
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", config().name.c_str());
  uuid_bytes(visible()[d], (unsigned char*)p->uuid.bytes);
  p->totalGlobalMem = config().total;
  p->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  p->sharedMemPerBlockOptin = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->sharedMemPerMultiprocessor = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = config().cc / 10;
  p->minor = config().cc % 10;
  p->textureAlignment = 512;
  p->multiProcessorCount = config().sms;
  p->maxThreadsPerMultiProcessor = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  p->maxBlocksPerMultiProcessor = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 40 << 20;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->asyncEngineCount = p->managedMemory = 1;
  p->streamPrioritiesSupported = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  p->pciBusID = visible()[d] + 1;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* out, int n, int d) {
  snprintf(out, n, "0000:%02x:00.0", visible()[d] + 1);
  return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  START;
  if (low) *low = 0;
  if (high) *high = -5;
  return cudaSuccess;
}
API cudaDeviceSynchronize() {
  CONTEXT;
  sleep_until(end_of_all());
  return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaDeviceEnablePeerAccess(int, unsigned) { return said(801); }
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }

// Memory.
API cudaMalloc(void** p, size_t n) { return said(device_alloc(p, n, current())); }
API cudaMallocManaged(void** p, size_t n, unsigned) {
  CONTEXT;
  return said(host_alloc(p, n, MANAGED));
}
API cudaFree(void* p) {
  sleep_until(end_of_all());
  if (p && region_at(p).on_host()) return said(host_free(p));
  return said(device_free(p));
}
API cudaMallocAsync(void** p, size_t n, cudaStream_t) { return said(device_alloc(p, n, current())); }
API cudaFreeAsync(void* p, cudaStream_t) { return said(device_free(p)); }
API cudaHostAlloc(void** p, size_t n, unsigned) {
  CONTEXT;
  return said(host_alloc(p, n));
}
API cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaHostGetDevicePointer(void** p, void* host, unsigned) {
  *p = host;
  return cudaSuccess;
}
API cudaFreeHost(void* p) { return said(host_free(p)); }
API cudaHostRegister(void* p, size_t n, unsigned) {
  CONTEXT;
  host_register(p, n);
  return cudaSuccess;
}
API cudaHostUnregister(void* p) {
  host_unregister(p);
  return cudaSuccess;
}
API cudaMemGetInfo(size_t* free, size_t* total) {
  CONTEXT;
  memory_info(free, total);
  return cudaSuccess;
}
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  START;
  Region w = region_at(p);
  memset(a, 0, sizeof *a);
  a->type = (cudaMemoryType)w.type;
  a->device = w.type ? w.device : -2;
  if (w.type == DEVICE) a->devicePointer = (void*)p;
  if (w.on_host()) a->hostPointer = a->devicePointer = (void*)p;
  return cudaSuccess;
}
// A copy takes its stream's time; the host waits for one of memory that isn't pinned.
static cudaError_t timed_copy(void* to, const void* from, size_t n, int kind, void* stream, bool waits) {
  CONTEXT;
  copy(to, from, n, kind);
  if (!disturbances().on) return cudaSuccess;
  Region source = region_at(from), target = region_at(to);
  if (source.type == DEVICE && target.type == DEVICE) {
    work(stream, memory_ns(2.0 * n));
  } else if (source.type == DEVICE || target.type == DEVICE) {
    transfer(stream, 8000 + n / speed().host);
    waits |= !(source.type == DEVICE ? target : source).on_host();
  }
  if (waits) sleep_until(end_of(stream));
  return cudaSuccess;
}
API cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind k) {
  return timed_copy(to, from, n, k, nullptr, true);
}
API cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind k, cudaStream_t s) {
  return timed_copy(to, from, n, k, s, false);
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return timed_copy(to, from, n, D2D, s, false);
}
API cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t w, size_t h, cudaMemcpyKind k,
                      cudaStream_t) {
  CONTEXT;
  for (size_t i = 0; i < h; ++i) copy((char*)to + i * tp, (const char*)from + i * fp, w, k);
  return cudaSuccess;
}
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaMemsetAsync(void* p, int, size_t n, cudaStream_t s) {
  CONTEXT;
  forget(p, n);
  work(s, memory_ns(n));
  return cudaSuccess;
}
API cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
API cudaGetSymbolAddress(void** p, const void* symbol) {
  static std::mutex lock;
  static std::map<const void*, void*> known;
  std::lock_guard<std::mutex> hold(lock);
  void*& at = known[symbol];
  if (!at) at = calloc(1, 1 << 16);
  *p = at;
  return cudaSuccess;
}
API cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return said(801); }
API cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return said(801); }
API cudaIpcCloseMemHandle(void*) { return said(801); }
API cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return said(801); }
API cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return said(801); }
API cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int d) {
  *p = (cudaMemPool_t)(uintptr_t)(d + 1);
  return cudaSuccess;
}
API cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) {
  *(uint64_t*)v = 0;
  return cudaSuccess;
}
API cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
