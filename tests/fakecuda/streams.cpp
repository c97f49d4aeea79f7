// The part of libcudart about streams, events and graphs. A stream that is captured has no forks; graphs replay
// nothing.
#include <time.h>

#include <atomic>

#include "runtime.h"

using namespace fake;

struct Stream {
  int device, priority, capturing;
  unsigned long long id;
};
struct Event {
  int recorded;
  int64_t ns;
};

// Streams: all work is done when the call returns.
static std::atomic<unsigned long long> ids{1};
static Stream* real(cudaStream_t s) {
  return (uintptr_t)s > 2 ? (Stream*)s : nullptr;
}  // 0, 1 and 2 are the default ones
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  CONTEXT;
  *s = (cudaStream_t) new Stream{current(), priority, 0, ids++};
  return cudaSuccess;
}
API cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamDestroy(cudaStream_t s) {
  delete real(s);
  return cudaSuccess;
}
API cudaStreamQuery(cudaStream_t) {
  START;
  return cudaSuccess;
}
API cudaStreamSynchronize(cudaStream_t) {
  CONTEXT;
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = real(s) ? real(s)->priority : 0;
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* data) {
  f(data);
  return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) {
  f(s, cudaSuccess, data);
  return cudaSuccess;
}

// Events: the host's clock.
static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  CONTEXT;
  *e = (cudaEvent_t) new Event{0, 0};
  return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  return cudaSuccess;
}
API cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  START;
  auto* it = (Event*)e;
  it->recorded = 1;
  it->ns = now();
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaEventQuery(cudaEvent_t) {
  START;
  return cudaSuccess;
}
API cudaEventSynchronize(cudaEvent_t) {
  START;
  return cudaSuccess;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *from = (Event*)a, *to = (Event*)b;
  if (!from->recorded || !to->recorded) return said(400);
  *ms = (to->ns - from->ns) / 1e6f;
  return cudaSuccess;
}

// Graphs: captured, instantiated and launched, all without doing anything.
static int graph_token[16];
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  if (!real(s)) return said(1);
  real(s)->capturing = 1;
  real(s)->id = ids++;
  return cudaSuccess;
}
API cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                  cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(s, mode);
}
API cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  if (real(s)) real(s)->capturing = 0;
  *g = (cudaGraph_t)graph_token;
  return cudaSuccess;
}
API cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  START;
  *status = real(s) && real(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* g,
                             const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* n) {
  cudaStreamIsCapturing(s, status);
  if (id && real(s)) *id = real(s)->id;
  if (g) *g = (cudaGraph_t)graph_token;
  if (deps) *deps = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}
API cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                     cudaGraphNodeParams*) {
  *node = (cudaGraphNode_t)graph_token;
  return cudaSuccess;
}
API cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* handle, cudaGraph_t, unsigned, unsigned) {
  *handle = 1;
  return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  *e = (cudaGraphExec_t)graph_token;
  return cudaSuccess;
}
API cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
API cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
API cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
