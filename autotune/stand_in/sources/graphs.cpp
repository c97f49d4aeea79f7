// The part of libcudart about graphs and libraries of kernels, whose types and parameters differ between CUDA's
// versions: none of its headers is included. A stream that is captured has no forks; a graph is how long its kernels
// take, and replays nothing else.
#include <atomic>
#include <cstddef>
#include <vector>

#include "clock.h"
#include "stream.h"

#define API extern "C" __attribute__((visibility("default"))) int

enum { SUCCESS = 0, INVALID = 1, SYMBOL_NOT_FOUND = 500 };
static char token[64];  // any node, library or kernel
// What a program wants to have destroyed with the last graph that keeps it.
struct UserObject {
  void* value;
  void (*destroy)(void*);
  std::atomic<unsigned> references;
};
struct Graph {
  double ns;
  std::vector<UserObject*> kept;
};

unsigned long long next_stream_id() {
  static std::atomic<unsigned long long> ids{1};
  return ids++;
}

API cudaThreadExchangeStreamCaptureMode(int*) { return SUCCESS; }
API cudaStreamBeginCapture(void* s, int) {
  if (!stream_of(s)) return INVALID;
  stream_of(s)->capturing = 1;
  stream_of(s)->id = next_stream_id();
  fake::capture(s);
  return SUCCESS;
}
API cudaStreamBeginCaptureToGraph(void* s, void*, const void*, const void*, size_t, int mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaStreamEndCapture(void* s, void** graph) {
  if (stream_of(s)) stream_of(s)->capturing = 0;
  *graph = new Graph{fake::captured(s)};
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
API cudaGraphInstantiate(void** executable, Graph* graph, unsigned long long) {
  *executable = new Graph{*graph};
  for (auto object : graph->kept) ++object->references;
  return SUCCESS;
}
API cudaGraphInstantiateWithFlags(void** executable, Graph* graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
API cudaGraphLaunch(Graph* executable, void* s) {
  fake::work(s, executable->ns);
  return SUCCESS;
}
API cudaUserObjectCreate(UserObject** object, void* value, void (*destroy)(void*), unsigned references, unsigned) {
  *object = new UserObject{value, destroy, {references}};
  return SUCCESS;
}
API cudaUserObjectRelease(UserObject* object, unsigned count) {
  if ((object->references -= count) != 0) return SUCCESS;
  object->destroy(object->value);
  delete object;
  return SUCCESS;
}
API cudaGraphRetainUserObject(Graph* graph, UserObject* object, unsigned count, unsigned flags) {
  if (flags != 1) object->references += count;  // 1: the graph takes over references of the caller's
  if ((void*)graph == token) return SUCCESS;    // one that is being captured: it is kept for ever
  graph->kept.insert(graph->kept.end(), count, object);
  return SUCCESS;
}
API cudaGraphDestroy(Graph* graph) {
  for (auto object : graph->kept) cudaUserObjectRelease(object, 1);
  delete graph;
  return SUCCESS;
}
API cudaDeviceGetGraphMemAttribute(int, int, unsigned long long* bytes) {
  *bytes = 0;
  return SUCCESS;
}
API cudaDeviceSetGraphMemAttribute() { return SUCCESS; }
API cudaGraphExecDestroy(Graph* executable) { return cudaGraphDestroy(executable); }
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
API cudaLibraryLoadFromFile(void** library) { return cudaLibraryLoadData(library); }
API cudaLibraryGetGlobal() { return SYMBOL_NOT_FOUND; }
API cudaLibraryGetManaged() { return SYMBOL_NOT_FOUND; }
API cudaLibraryGetUnifiedFunction() { return SYMBOL_NOT_FOUND; }
API cudaLibraryGetKernelCount(unsigned* count) {
  *count = 0;
  return SUCCESS;
}
API cudaLibraryUnload(void*) { return SUCCESS; }
API cudaLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = token;
  return SUCCESS;
}
API cudaKernelSetAttributeForDevice() { return SUCCESS; }
API cudaMemPrefetchAsync() { return SUCCESS; }
