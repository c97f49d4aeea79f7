// How long a kernel of torch takes, by its name, grid and arguments: smooth, plausible and known, not exact.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

// What is read off a kernel's name, once.
class Duration {
 public:
  explicit Duration(const std::string& name);
  double ns(dim3 grid, dim3 block, void** arguments) const;

 private:
  enum Kind { THREADS, CHUNKS, ROWS, FLASH, EFFICIENT } kind = THREADS;
  double bytes = 32;            // of each thread; of each element of a chunk or a row
  int rows = -1, elements = 0;  // arguments that count them; rows -1: a block for each
  int width = 64, tile = 64;    // of attention: of a head, and tokens of a block
  double passes = 1;            // over what a forward pass of attention computes
  bool half = false, causal = false;
};
