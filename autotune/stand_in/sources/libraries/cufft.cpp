// libcufft: a plan is a number and needs no workspace. All else is a stub.
#include <cstddef>

extern "C" {

int cufftCreate(int* plan) {
  *plan = 1;
  return 0;
}
int cufftXtMakePlanMany(int, int, long long*, long long*, long long, long long, int, long long*, long long, long long,
                        int, long long, size_t* workspace, int) {
  *workspace = 0;
  return 0;
}
}
