// libcuda.so.1: the part of the driver API that torch, triton and bitsandbytes use.
#include <cuda.h>
#include <dlfcn.h>

#include "clock.h"
#include "device.h"
#include "stream.h"

using namespace fake;
#define API extern "C" __attribute__((visibility("default"))) CUresult
#define START \
  if (int bad = begin()) return (CUresult)bad

extern "C" __attribute__((visibility("default"))) void fakecuda_copy(void* to, const void* from, size_t n, int kind) {
  copy(to, from, n, kind);
}  // for NCCL

API cuInit(unsigned) {
  START;
  return count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
API cuDriverGetVersion(int* v) {
  *v = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API cuDeviceGetCount(int* n) {
  START;
  *n = count();
  return CUDA_SUCCESS;
}
API cuDeviceGet(CUdevice* d, int ordinal) {
  START;
  if (ordinal >= count()) return CUDA_ERROR_INVALID_DEVICE;
  *d = ordinal;
  return CUDA_SUCCESS;
}
API cuDeviceGetName(char* name, int n, CUdevice) {
  snprintf(name, n, "%s", config().name.c_str());
  return CUDA_SUCCESS;
}
API cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
  uuid_bytes(visible()[d], (unsigned char*)u->bytes);
  return CUDA_SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  *n = config().total;
  return CUDA_SUCCESS;
}
API cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  START;
  return (CUresult)attribute(a, d, v);
}
API cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) {
  START;
  if (flags) *flags = 0;
  *active = has_context(d);
  return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  *c = (CUcontext)(uintptr_t)(d + 1);
  return (CUresult)context(d);
}
API cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API cuCtxGetCurrent(CUcontext* c) {
  START;
  *c = has_context(current()) ? (CUcontext)(uintptr_t)(current() + 1) : nullptr;
  return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext c) {
  START;
  if (c) set_current((int)(uintptr_t)c - 1);
  return CUDA_SUCCESS;
}
API cuCtxPushCurrent_v2(CUcontext c) { return cuCtxSetCurrent(c); }
API cuCtxPopCurrent_v2(CUcontext* c) {
  if (c) cuCtxGetCurrent(c);
  return CUDA_SUCCESS;
}
API cuCtxGetDevice(CUdevice* d) {
  *d = current();
  return CUDA_SUCCESS;
}
API cuCtxSynchronize() {
  START;
  sleep_until(end_of_all());
  return CUDA_SUCCESS;
}
API cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 0;
  return CUDA_SUCCESS;
}
API cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API cuGetErrorString(CUresult, const char** s) {
  *s = "a driver error of fakecuda";
  return CUDA_SUCCESS;
}
API cuGetErrorName(CUresult, const char** s) {
  *s = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
API cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  *out = nullptr;
  for (const char* suffix : {"_v3", "_v2", ""})
    if (!*out) *out = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str());
  if (!*out) {
    Dl_info info;
    dladdr((void*)cuInit, &info);
    void* me = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (const char* suffix : {"_v3", "_v2", ""})
      if (!*out) *out = dlsym(me, (std::string(name) + suffix).c_str());
  }
  if (found) *found = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// A CUDA runtime that is linked into a library asks for this; there is none here, and it refuses all calls.
static const char* own_runtime = "";
API cuGetExportTable(const void** table, const CUuuid*) {
  Dl_info info;
  if (dladdr(__builtin_return_address(0), &info)) own_runtime = info.dli_fname;
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
extern "C" __attribute__((visibility("default"))) const char* fakecuda_own_runtime() { return own_runtime; }

// Memory.
API cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return (CUresult)device_alloc((void**)p, n, current()); }
API cuMemFree_v2(CUdeviceptr p) { return (CUresult)device_free((void*)p); }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (int bad = context(current())) return (CUresult)bad;
  memory_info(free, total);
  return CUDA_SUCCESS;
}
API cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  Region w = region_at((void*)p);
  if (!w.type) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned*)out = w.type;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *(int*)out = w.device;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || a == CU_POINTER_ATTRIBUTE_HOST_POINTER)
    *(CUdeviceptr*)out = p;
  else if (a == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
    *(CUdeviceptr*)out = w.base;
  else if (a == CU_POINTER_ATTRIBUTE_CONTEXT)
    *(CUcontext*)out = (CUcontext)(uintptr_t)(w.device + 1);
  else
    *(unsigned*)out = 0;
  return CUDA_SUCCESS;
}
API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr p) {
  Region w = region_at((void*)p);
  if (base) *base = w.base;
  if (size) *size = w.size;
  return CUDA_SUCCESS;
}
API cuMemsetD32Async(CUdeviceptr p, unsigned, size_t n, CUstream s) {
  forget((void*)p, n * 4);
  work(s, memory_ns(4.0 * n));
  return CUDA_SUCCESS;
}
API cuMemsetD8Async(CUdeviceptr p, unsigned char, size_t n, CUstream s) {
  forget((void*)p, n);
  work(s, memory_ns(n));
  return CUDA_SUCCESS;
}

// Virtual memory: expandable segments.
struct Physical {
  size_t size;
  int device;
};
API cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *n = kPage;
  return CUDA_SUCCESS;
}
API cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  uintptr_t at = 0;
  int bad = reserve(&at, n);
  *p = at;
  return (CUresult)bad;
}
API cuMemAddressFree(CUdeviceptr p, size_t n) {
  unreserve(p, n);
  return CUDA_SUCCESS;
}
API cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* prop, unsigned long long) {
  int device = prop->location.id;
  if (int bad = context(device)) return (CUresult)bad;
  if (!charge(device, n)) return CUDA_ERROR_OUT_OF_MEMORY;
  *h = (CUmemGenericAllocationHandle) new Physical{n, device};
  return CUDA_SUCCESS;
}
API cuMemRelease(CUmemGenericAllocationHandle h) {
  auto* p = (Physical*)h;
  charge(p->device, -(int64_t)p->size);
  delete p;
  return CUDA_SUCCESS;
}
API cuMemMap(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  map(p, n);
  return CUDA_SUCCESS;
}
API cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API cuMemUnmap(CUdeviceptr p, size_t n) {
  unmap(p, n);
  return CUDA_SUCCESS;
}
API cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) { return CUDA_ERROR_NOT_SUPPORTED; }
API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* status) {
  *status = (CUstreamCaptureStatus)(stream_of(s) && stream_of(s)->capturing);
  return CUDA_SUCCESS;
}
API cuStreamWriteValue32_v2(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }

// Modules and kernels: triton and nvrtc.
static char token[64];
API cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule)token;
  return CUDA_SUCCESS;
}
API cuModuleLoadData(CUmodule* m, const void*) {
  if (int bad = context(current())) return (CUresult)bad;
  *m = (CUmodule)token;
  return CUDA_SUCCESS;
}
API cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
  *m = (CUmodule)token;
  return CUDA_SUCCESS;
}
API cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API cuModuleGetFunction(CUfunction* f, CUmodule, const char*) {
  *f = (CUfunction)token;
  return CUDA_SUCCESS;
}
API cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
API cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK                                  ? 1024
       : a == CU_FUNC_ATTRIBUTE_NUM_REGS                                             ? 64
       : a == CU_FUNC_ATTRIBUTE_PTX_VERSION || a == CU_FUNC_ATTRIBUTE_BINARY_VERSION ? config().cc
                                                                                     : 0;
  return CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
// Each thread of a kernel of triton is taken to move 16 bytes of each of three tensors.
static CUresult launch(double blocks, double threads, CUstream stream) {
  START;
  if (int bad = launched()) return (CUresult)bad;
  work(stream, memory_ns(blocks * threads * 48));
  return CUDA_SUCCESS;
}
API cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                   CUstream s, void**, void**) {
  return launch(double(gx) * gy * gz, double(bx) * by * bz, s);
}
API cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  return launch(double(c->gridDimX) * c->gridDimY * c->gridDimZ, double(c->blockDimX) * c->blockDimY * c->blockDimZ,
                c->hStream);
}
API cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned m, CUstream s, void** args) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, m, s, args, nullptr);
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int block, size_t) {
  *n = block > 1024 ? 1 : 2048 / (block > 64 ? block : 64);
  return CUDA_SUCCESS;
}
API cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 16;
  return CUDA_SUCCESS;
}
API cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
API cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
API cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
