// The part of libcudart by which kernels are registered and launched. They do nothing, but take their time.
#include <map>
#include <mutex>
#include <vector>

#include "durations.h"
#include "runtime.h"

using namespace fake;

// Code asks for all(x), and takes other ways if it is not so (a padding mask that masks nothing
// keeps the attention kernels of no mask): the byte read back right after that reduction is 1. Of a single element the
// reduction is a copy: then a comparison with a number before it is looked for. All other bytes read as 0 (false).
static std::map<const void*, int>& meanings() {
  static auto* it = new std::map<const void*, int>;
  return *it;
}

// FAKECUDA_KERNELS=FILE: how often each was launched, written at the end (torch's own, not triton's).
static const char* census = getenv("FAKECUDA_KERNELS");
static std::mutex census_lock;
static std::map<const void*, std::string>& names() {
  static auto* it = new std::map<const void*, std::string>;
  return *it;
}
static std::map<const void*, long>& launches() {
  static auto* it = new std::map<const void*, long>;
  return *it;
}
static struct Census {
  ~Census() {
    if (!census || launches().empty()) return;
    if (FILE* f = fopen((std::string(census) + "." + std::to_string(getpid())).c_str(), "w")) {
      for (auto& it : launches()) fprintf(f, "%ld\t%s\n", it.second, names()[it.first].c_str());
      fclose(f);
    }
  }
} write_census;
static Duration& duration(const void* kernel) {
  static std::mutex lock;
  static auto* known = new std::map<const void*, Duration>;
  std::lock_guard<std::mutex> hold(lock);
  return known->try_emplace(kernel, names()[kernel]).first->second;
}
static cudaError_t launch(const void* kernel, dim3 g, dim3 b, void** arguments, cudaStream_t stream) {
  CONTEXT;
  if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || (size_t)b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535)
    return said(9);
  if (census) {
    std::lock_guard<std::mutex> hold(census_lock);
    ++launches()[kernel];
  }
  if (int bad = launched()) return said(bad);
  if (disturbances().on) work(stream, duration(kernel).ns(g, b, arguments));
  auto it = meanings().find(kernel);
  last_meaning = it == meanings().end() ? OTHER : it->second;
  return cudaSuccess;
}
API cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** arguments, size_t, cudaStream_t s) {
  return launch(f, g, b, arguments, s);
}
API cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** arguments, size_t, cudaStream_t s) {
  return launch(f, g, b, arguments, s);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** arguments) {
  return launch(f, c->gridDim, c->blockDim, arguments, c->stream);
}
API __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void** arguments, size_t, cudaStream_t s) {
  return launch((const void*)f, g, b, arguments, s);
}
API __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}

// Of the architectures that torch's kernels are built for, the newest that a device can run: cub looks for none
// between.
static int built_for(int cc) {
  int newest = 75;
  for (int it : {80, 86, 90, 100, 120})
    if (it <= cc) newest = it;
  return newest;
}
API cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  CONTEXT;
  memset(a, 0, sizeof *a);
  a->numRegs = 64;
  a->maxThreadsPerBlock = 1024;
  a->ptxVersion = a->binaryVersion = built_for(config().cc);
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  CONTEXT;
  return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int block, size_t) {
  *n = block > 1024 ? 1 : 1024 / (block > 64 ? block : 64);
  return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int block, size_t, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, nullptr, block, 0);
}
struct Call {
  dim3 grid, block;
  size_t memory;
  void* stream;
};
static thread_local std::vector<Call> calls;
VISIBLE(unsigned) __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, CUstream_st* s) {
  calls.push_back({g, b, m, s});
  return 0;
}
API __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  if (calls.empty()) return said(cudaErrorMissingConfiguration);
  Call c = calls.back();
  calls.pop_back();
  *g = c.grid;
  *b = c.block;
  *m = c.memory;
  *(void**)s = c.stream;
  return cudaSuccess;
}
static void* handle[4];
VISIBLE(void**) __cudaRegisterFatBinary(void*) { return handle; }
VISIBLE(void) __cudaRegisterFatBinaryEnd(void**) {}
VISIBLE(void) __cudaUnregisterFatBinary(void**) {}
VISIBLE(char) __cudaInitModule(void**) { return 1; }
VISIBLE(void) __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
VISIBLE(void)
__cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  if (strstr(name, "and_kernel_cuda"))
    meanings()[host] = ALL;
  else if (strstr(name, "UnaryFunctor") && strstr(name, "CompareEqFunctor"))
    meanings()[host] = COMPARED;
  if (census || disturbances().on) {
    std::lock_guard<std::mutex> hold(census_lock);
    names()[host] = name;
  }
}
