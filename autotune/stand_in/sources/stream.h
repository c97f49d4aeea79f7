// A stream, whether or not it is captured into a graph.
#pragma once
#include <cstdint>

struct Stream {
  int device, priority, capturing;
  unsigned long long id;
};

unsigned long long next_stream_id();

// None for 0, 1 and 2, the default streams.
inline Stream* stream_of(void* s) { return (uintptr_t)s > 2 ? (Stream*)s : nullptr; }
