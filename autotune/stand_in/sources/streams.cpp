// The part of libcudart about streams and events.
#include "runtime.h"
#include "stream.h"

using namespace fake;

struct Event {
  int recorded;
  int64_t ns;
};

// Streams: without the clock all work is done when the call returns.
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  CONTEXT;
  *s = (cudaStream_t) new Stream{current(), priority, 0, next_stream_id()};
  return cudaSuccess;
}
API cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamDestroy(cudaStream_t s) {
  if (stream_of(s)) forget_stream(s);
  delete stream_of(s);
  return cudaSuccess;
}
API cudaStreamQuery(cudaStream_t s) {
  START;
  return end_of(s) > now() ? said(600) : cudaSuccess;
}
API cudaStreamSynchronize(cudaStream_t s) {
  CONTEXT;
  sleep_until(end_of(s));
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  if (disturbances().on) not_before(s, ((Event*)e)->ns);
  return cudaSuccess;
}
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

// Events: when all before them in their stream will be done; the host's clock, if that isn't kept.
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
API cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  START;
  *(Event*)e = {1, std::max(now(), end_of(s))};
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaEventQuery(cudaEvent_t e) {
  START;
  return ((Event*)e)->ns > now() ? said(600) : cudaSuccess;
}
API cudaEventSynchronize(cudaEvent_t e) {
  START;
  sleep_until(((Event*)e)->ns);
  return cudaSuccess;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *from = (Event*)a, *to = (Event*)b;
  if (!from->recorded || !to->recorded) return said(400);
  *ms = (to->ns - from->ns) / 1e6f;
  return cudaSuccess;
}
