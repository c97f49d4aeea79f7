// libcublas: what is asked back. All else is a stub.
extern "C" {

int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
}
