// The part of libcudart about streams and events.
#include <time.h>

#include "runtime.h"
#include "stream.h"

using namespace fake;

struct Event {
  int recorded;
  int64_t ns;
};

// Streams: all work is done when the call returns.
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  CONTEXT;
  *s = (cudaStream_t) new Stream{current(), priority, 0, next_stream_id()};
  return cudaSuccess;
}
API cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamDestroy(cudaStream_t s) {
  delete stream_of(s);
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
  *p = stream_of(s) ? stream_of(s)->priority : 0;
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
