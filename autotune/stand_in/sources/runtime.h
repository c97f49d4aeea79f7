// What the two parts of libcudart share.
#pragma once
#include <cuda_runtime_api.h>

#include "clock.h"
#include "device.h"

extern thread_local cudaError_t last_error;
inline cudaError_t said(int code) {
  if (code) last_error = (cudaError_t)code;
  return (cudaError_t)code;
}

#define VISIBLE(type) extern "C" __attribute__((visibility("default"))) type
#define API VISIBLE(cudaError_t)
#define START \
  if (int bad = fake::begin()) return said(bad)
#define CONTEXT \
  if (int bad = fake::context(fake::current())) return said(bad)
