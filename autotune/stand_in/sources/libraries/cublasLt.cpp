// libcublasLt: one algorithm that needs no workspace of its own (torch gives every product the same), and how long
// products take. All else is a stub.
#include <cstddef>
#include <cstdint>
#include <cstring>

// cublasLtMatmulHeuristicResult_t
struct Result {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int batch = 1;
};
struct Product {
  int compute;
};

extern "C" {

void fakecuda_product(void* stream, double m, double n, double k, double batch, int bytes, int tf32);  // libcuda.so.1

size_t cublasLtGetVersion() { return 130100; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Result* results,
                                   int* found) {
  *found = wanted > 0;
  if (*found) memset(results, 0, sizeof *results);
  return 0;
}

int cublasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t) {
  *out = new Layout{type, rows, columns};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* it) {
  delete it;
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(Layout* it, int attribute, const void* value, size_t) {
  if (attribute == 5) it->batch = *static_cast<const int*>(value);  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
  return 0;
}
int cublasLtMatmulDescCreate(Product** out, int compute, int) {
  *out = new Product{compute};
  return 0;
}
int cublasLtMatmulDescDestroy(Product* it) {
  delete it;
  return 0;
}
int cublasLtMatmul(void*, Product* product, void*, void*, Layout* a, void*, Layout*, void*, void*, Layout*, void*,
                   Layout* d, void*, void*, size_t, void* stream) {
  // The matrices may be transposed: the length of the sums is what the rows of the result leave of `a`.
  double k = double(a->rows) * a->columns / d->rows;
  int bytes = a->type == 0 ? 4 : a->type == 1 ? 8 : a->type == 28 ? 1 : 2;  // cudaDataType
  bool tf32 = product->compute == 77;                                       // CUBLAS_COMPUTE_32F_FAST_TF32
  fakecuda_product(stream, d->rows, d->columns, k, d->batch, bytes, tf32);
  return 0;
}
}
