#include "durations.h"

#include <map>
#include <mutex>

#include "clock.h"

namespace {

bool has(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

// The number behind `mark` in a mangled name, or `otherwise`.
int number(const std::string& name, const std::string& mark, int otherwise) {
  size_t at = name.find(mark);
  return at == std::string::npos ? otherwise : atoi(name.c_str() + at + mark.size());
}

// FLOP of the latest forward pass of attention, by heads and batch: the grid of a backward pass doesn't tell its
// length.
std::mutex lock;
std::map<std::pair<unsigned, unsigned>, double> forward;

}  // namespace

Duration::Duration(const std::string& name) {
  half = has(name, "BFloat16") || has(name, "bfloat16") || has(name, "Half") || has(name, "half_t") ||
         has(name, "_bf16_") || has(name, "_f16_");
  double size = half ? 2 : 4;
  if (has(name, "flash_fwd") || has(name, "flash_bwd")) {  // aten/src/ATen/native/transformers/cuda/flash_attn
    std::string traits = "kernel_traitsILi";
    size_t at = name.find(traits), end = name.find("EELb");
    if (at == std::string::npos) return;  // what prepares and converts
    kind = FLASH;
    width = atoi(name.c_str() + at + traits.size());
    std::string tiles = name.substr(name.find("ELi", at) + 3);
    bool backward = has(name, "flash_bwd");
    tile = atoi(backward ? tiles.c_str() + tiles.find("ELi") + 3 : tiles.c_str());
    passes = backward ? 2.5 : 1;
    causal = end != std::string::npos && end + 8 < name.size() && name[end + 8] == '1';  // after dropout
  } else if (has(name,
                 "fmha_cutlass")) {  // .../cuda/mem_eff_attention/kernels: fmha_cutlassF_bf16_aligned_64x64_rf_sm80
    kind = EFFICIENT;
    tile = number(name, "_aligned_", 64);
    width = has(name, "x128") || has(name, "k128") ? 128 : has(name, "k65536") ? 256 : 64;
    passes = has(name, "fmha_cutlassB") ? 2.5 : 1;
  } else if (has(name, "multi_tensor_apply_kernel")) {  // chunks of 65,536 elements of each list
    kind = CHUNKS;
    bytes = size * number(name, "TensorListMetadataILi", 3);
  } else if (has(name, "SoftMaxForward") || has(name, "SoftMaxBackward")) {  // a row for each block
    kind = ROWS;
    bool backward = has(name, "SoftMaxBackward");
    elements = backward ? 3 : 2;
    bytes = size * (backward ? 3 : 2);
  } else if (has(name, "softmax_warp_")) {
    kind = ROWS;
    bool backward = has(name, "backward");
    rows = backward ? 3 : 2;
    elements = backward ? 5 : 4;
    bytes = size * (backward ? 3 : 2);
  } else if (has(name, "vectorized_layer_norm_kernel") || has(name, "RowwiseMoments")) {
    kind = ROWS;
    bytes = size * 2;
  } else if (has(name, "layer_norm_grad_input_kernel")) {
    kind = ROWS;
    elements = 6;
    bytes = size * 3;
  } else if (has(name, "GammaBetaBackward")) {
    kind = ROWS;
    rows = 0;
    elements = 1;
    bytes = size * 2;
  } else if (has(name, "vectorized_elementwise_kernel")) {  // 16 bytes of each array, whatever the type
    bytes = 16 * number(name, "arrayIPcLm", 3);
  } else if (has(name, "elementwise_kernel")) {
    bytes = 4 * size * number(name, "arrayIPcLm", 3);
  } else if (has(name, "reduce_kernel")) {
    bytes = 16 * size;
  }
}

double Duration::ns(dim3 grid, dim3 block, void** arguments) const {
  double blocks = double(grid.x) * grid.y * grid.z, threads = blocks * block.x * block.y * block.z;
  auto count = [&](int argument) { return arguments ? double(*static_cast<int*>(arguments[argument])) : 1024.0; };
  switch (kind) {
    case CHUNKS: return fake::memory_ns(blocks * 65536 * bytes);
    case ROWS: return fake::memory_ns((rows < 0 ? blocks : count(rows)) * count(elements) * bytes);
    case FLASH:
    case EFFICIENT: {
      double length = double(grid.x) * tile,
             flop = 4.0 * grid.y * grid.z * length * length * width * (causal ? 0.5 : 1);
      if (kind == EFFICIENT) {
        std::lock_guard<std::mutex> hold(lock);
        double& known = forward[{grid.y, grid.z}];
        flop = passes > 1 && known ? known : (known = flop);
      }
      return 4000 + passes * flop / (500 * (half ? fake::speed().half : fake::speed().tf32));
    }
    default: return fake::memory_ns(threads * bytes);
  }
}
