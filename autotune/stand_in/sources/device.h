// The fake device: its memory, copies and attributes. In libcuda.so.1; libcudart uses it. Results are CUDA's error
// codes.
#pragma once
#include "state.h"

namespace fake {

enum Kind { H2H = 0, H2D = 1, D2H = 2, D2D = 3, ANY = 4 };  // of a copy, numbered as CUDA does
enum Type { UNKNOWN = 0, HOST = 1, DEVICE = 2, MANAGED = 3 };

// A piece of memory; `charged` is what it takes of the device, in bytes.
struct Region {
  int type = UNKNOWN, device = 0;
  uintptr_t base = 0;
  size_t size = 0, charged = 0;
  bool on_host() const { return type == HOST || type == MANAGED; }
};

constexpr size_t kPage = 2 << 20;  // the device hands out memory in pages of this size, in bytes

int begin();              // 0, or 3 in a process forked after CUDA was started
int launched();           // counts a launch; 0, or the error that FAKECUDA_FAULT has planted
int number_of_process();  // see state.h; 0: it holds nothing yet
int context(int device);  // starts it: 0, 2 (no memory left), 3, 46 (of another process alone), 101 (no such device) or
                          // 999 (lost), or the error that stays
bool has_context(int device);
int count();  // of visible devices
int current();
void set_current(int device);
int attribute(int number, int device, int* value);

bool charge(int device, int64_t by);  // false: the device's memory is too small
int device_alloc(void** out, size_t size, int device);
int device_free(void* at);
int host_alloc(void** out, size_t size, int type = HOST);
int host_free(void* at);
void host_register(void* at, size_t size);
void host_unregister(void* at);
void memory_info(size_t* free, size_t* total);  // of the current device
Region region_at(const void* at);

// Virtual memory, for expandable segments.
int reserve(uintptr_t* out, size_t size);
void unreserve(uintptr_t at, size_t size);
void map(uintptr_t at, size_t size);
void unmap(uintptr_t at, size_t size);

void copy(void* to, const void* from, size_t size, int kind);
void forget(void* at, size_t size);  // a memset: what was copied there is no longer known

// What this thread's last kernel was, as far as the next byte that is read depends on it; see launches.cpp.
enum Meaning { OTHER, COMPARED, ALL };
extern thread_local int last_meaning;

}  // namespace fake
