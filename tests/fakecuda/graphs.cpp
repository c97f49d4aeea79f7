// The part of libcudart about graphs and libraries of kernels, whose types and parameters differ between CUDA's
// versions: none of its headers is included. A stream that is captured has no forks; graphs replay nothing.
#include <atomic>
#include <cstddef>

#include "stream.h"

#define API extern "C" __attribute__((visibility("default"))) int

enum { SUCCESS = 0, INVALID = 1 };
static char token[64];  // any graph, node, library or kernel

unsigned long long next_stream_id() {
  static std::atomic<unsigned long long> ids{1};
  return ids++;
}

API cudaThreadExchangeStreamCaptureMode(int*) { return SUCCESS; }
API cudaStreamBeginCapture(void* s, int) {
  if (!stream_of(s)) return INVALID;
  stream_of(s)->capturing = 1;
  stream_of(s)->id = next_stream_id();
  return SUCCESS;
}
API cudaStreamBeginCaptureToGraph(void* s, void*, const void*, const void*, size_t, int mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaStreamEndCapture(void* s, void** graph) {
  if (stream_of(s)) stream_of(s)->capturing = 0;
  *graph = token;
  return SUCCESS;
}
API cudaStreamIsCapturing(void* s, int* status) {
  *status = stream_of(s) && stream_of(s)->capturing;
  return SUCCESS;
}
// CUDA 12 has it without edges, under this name.
API cudaStreamGetCaptureInfo_v2(void* s, int* status, unsigned long long* id, void** graph, const void** nodes,
                                size_t* count) {
  if (id && stream_of(s)) *id = stream_of(s)->id;
  if (graph) *graph = token;
  if (nodes) *nodes = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(s, status);
}
API cudaStreamGetCaptureInfo(void* s, int* status, unsigned long long* id, void** graph, const void** nodes,
                             const void** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return cudaStreamGetCaptureInfo_v2(s, status, id, graph, nodes, count);
}
API cudaStreamUpdateCaptureDependencies() { return SUCCESS; }
API cudaGraphAddNode(void** node, void*, const void*, const void*, size_t, void*) {
  *node = token;
  return SUCCESS;
}
API cudaGraphConditionalHandleCreate(unsigned long long* handle, void*, unsigned, unsigned) {
  *handle = 1;
  return SUCCESS;
}
API cudaGraphInstantiate(void** executable, void*, unsigned long long) {
  *executable = token;
  return SUCCESS;
}
API cudaGraphInstantiateWithFlags(void** executable, void*, unsigned long long) {
  *executable = token;
  return SUCCESS;
}
API cudaGraphLaunch(void*, void*) { return SUCCESS; }
API cudaGraphDestroy(void*) { return SUCCESS; }
API cudaGraphExecDestroy(void*) { return SUCCESS; }
API cudaGraphDebugDotPrint(void*, const char*, unsigned) { return SUCCESS; }
API cudaGraphGetNodes(void*, void*, size_t* count) {
  *count = 1;
  return SUCCESS;
}
#if CUDA_MAJOR >= 13
API cudaGraphNodeGetDependencies(void*, void*, void*, size_t* count) {
#else
API cudaGraphNodeGetDependencies(void*, void*, size_t* count) {
#endif
  *count = 0;
  return SUCCESS;
}

API cudaLibraryLoadData(void** library) {
  *library = token;
  return SUCCESS;
}
API cudaLibraryUnload(void*) { return SUCCESS; }
API cudaLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = token;
  return SUCCESS;
}
API cudaKernelSetAttributeForDevice() { return SUCCESS; }
API cudaMemPrefetchAsync() { return SUCCESS; }
