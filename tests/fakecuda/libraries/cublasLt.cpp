// libcublasLt: one algorithm that needs no workspace of its own (torch gives every product the same). All else is a
// stub.
#include <cstddef>
#include <cstring>

// cublasLtMatmulHeuristicResult_t
struct Result {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

extern "C" {

size_t cublasLtGetVersion() { return 130100; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Result* results,
                                   int* found) {
  *found = wanted > 0;
  if (*found) memset(results, 0, sizeof *results);
  return 0;
}
}
