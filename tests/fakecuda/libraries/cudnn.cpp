// libcudnn: no plan of its backend is built, so convolutions fail as not supported. All else is a stub.
#include <cstddef>

namespace {
char token[64];
}

extern "C" {

size_t cudnnGetVersion() { return 91900; }
size_t cudnnGetCudartVersion() { return 13000; }
int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? 9 : which == 1 ? 19 : 0;
  return 0;
}
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}
int cudnnBackendCreateDescriptor(int, void** out) {
  *out = token;
  return 0;
}
int cudnnBackendFinalize(void*) { return 3000; }  // CUDNN_STATUS_NOT_SUPPORTED
}
