// The stand-in's clock, on where FAKECUDA_CLOCK is set: each stream has a time of its own, to which what is launched
// adds its duration and which a synchronisation sleeps until. In libcuda.so.1; the other libraries use it.
#pragma once
#include "state.h"

namespace fake {

// FAKECUDA_CLOCK=1, or what disturbs: noise=0.001,process=0.003,ramp=0.1,drift=0.03,first=0.01,cap=0.05,seed=7.
struct Disturbances {
  bool on = false;
  double noise = 0;    // deviation of a tenth of a second
  double process = 0;  // deviation of a process
  double ramp = 0;     // by how much a cold chip is slower; it is warm after some seconds
  double drift = 0;    // by how much a hot chip is slower; it is hot after a minute or two
  double first = 0;    // by how much the oldest of several processes is slower
  double cap = 0;      // by how much the power limit slows down
  double seed = 0;
  Disturbances() {
    std::string text = env("FAKECUDA_CLOCK", "0");
    on = text != "0";
    const std::pair<const char*, double*> fields[] = {{"noise=", &noise}, {"process=", &process}, {"ramp=", &ramp},
                                                      {"drift=", &drift}, {"first=", &first},     {"cap=", &cap},
                                                      {"seed=", &seed}};
    for (auto& field : fields) {
      size_t at = ("," + text).find("," + std::string(field.first));
      if (at != std::string::npos) *field.second = atof(text.c_str() + at + strlen(field.first));
    }
  }
};
inline const Disturbances& disturbances() {
  static const Disturbances it;
  return it;
}

// What a chip attains, in FLOP per picosecond and bytes per nanosecond: two thirds to three quarters of its data
// sheet's.
struct Speed {
  double half, tf32, single, bandwidth, host, link;  // the last two: to the host, and between devices
};
const Speed& speed();

int64_t now();                              // the host's clock, in ns
void work(void* stream, double ns);         // a kernel: it occupies the chip
void transfer(void* stream, double ns);     // a copy or a message: it occupies the stream alone
int64_t end_of(void* stream);               // when the stream will have done all
int64_t end_of_all();                       // when all streams of this process will
void not_before(void* stream, int64_t ns);  // the stream waits for an event
void sleep_until(int64_t ns);               // so does the host
void capture(void* stream);                 // durations are added up from now on
double captured(void* stream);              // the sum, which ends it
void forget_stream(void* stream);

double product_ns(double m, double n, double k, double batch, int bytes, bool tf32);
inline double memory_ns(double bytes) { return 2000 + bytes / speed().bandwidth; }

}  // namespace fake

// For the libraries beside libcudart.
extern "C" void fakecuda_work(void* stream, double ns);
extern "C" void fakecuda_product(void* stream, double m, double n, double k, double batch, int bytes, int tf32);
extern "C" void fakecuda_message(void* stream, double bytes);
// Of warp.cpp, where that is preloaded: moves all clocks on.
extern "C" __attribute__((weak)) void fakecuda_skip(int64_t until);
