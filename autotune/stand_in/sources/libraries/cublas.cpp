// libcublas: handles with their stream, and how long products take. All else is a stub.
extern "C" {

void fakecuda_product(void* stream, double m, double n, double k, double batch, int bytes, int tf32);  // libcuda.so.1

struct Handle {
  void* stream = nullptr;
  int math = 0;
};

int cublasCreate_v2(Handle** out) {
  *out = new Handle;
  return 0;
}
int cublasDestroy_v2(Handle* it) {
  delete it;
  return 0;
}
int cublasSetStream_v2(Handle* it, void* stream) {
  it->stream = stream;
  return 0;
}
int cublasSetMathMode(Handle* it, int mode) {
  it->math = mode;
  return 0;
}
int cublasGetMathMode(Handle* it, int* mode) {
  *mode = it->math;
  return 0;
}
int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}

// Of cudaDataType and cublasMath_t: fp32, fp64, TF32 for products in fp32.
static int multiply(Handle* it, double m, double n, double k, double batch, int type) {
  enum { FP32 = 0, FP64 = 1, TF32 = 3 };
  fakecuda_product(it->stream, m, n, k, batch, type == FP32 ? 4 : type == FP64 ? 8 : 2, (it->math & 15) == TF32);
  return 0;
}
int cublasSgemm_v2(Handle* it, int, int, int m, int n, int k) { return multiply(it, m, n, k, 1, 0); }
int cublasGemmEx(Handle* it, int, int, int m, int n, int k, void*, void*, int type) {
  return multiply(it, m, n, k, 1, type);
}
int cublasSgemmStridedBatched(Handle* it, int, int, int m, int n, int k, void*, void*, int, long long, void*, int,
                              long long, void*, void*, int, long long, int batch) {
  return multiply(it, m, n, k, batch, 0);
}
int cublasGemmStridedBatchedEx(Handle* it, int, int, int m, int n, int k, void*, void*, int type, int, long long, void*,
                               int, int, long long, void*, void*, int, int, long long, int batch) {
  return multiply(it, m, n, k, batch, type);
}
}
