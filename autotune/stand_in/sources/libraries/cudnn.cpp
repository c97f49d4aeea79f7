// libcudnn. Its backend builds a plan of whatever it is given; the plan of a convolution asks for a workspace of
// plausible size and takes the time of a product. Batch norm needs none. What else asks for a workspace (RNNs, CTC
// loss) isn't supported.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#ifndef CUDNN_VERSION
#define CUDNN_VERSION 91900
#endif

extern "C" void fakecuda_product(void* stream, double m, double n, double k, double batch, int bytes, int tf32);

namespace {

std::mutex lock;
std::map<void*, void*> streams;  // by handle

enum Status { SUCCESS = 0, NOT_SUPPORTED = 3000 };

// Numbers of cudnn_graph.h: of descriptors, of types of attributes, of attributes.
enum { ENGINE = 2, ENGINE_CONFIG = 3, FORWARD = 10, BACKWARD_FILTER = 11, BACKWARD_DATA = 12 };
enum { HANDLE = 0, BOOLEAN = 2, INT64 = 3, DOUBLE = 5, POINTER = 6, DESCRIPTOR = 15, CHAR = 24, FRACTION = 26 };
enum {
  HEURISTICS_GRAPH = 201,
  HEURISTICS_RESULTS = 202,
  CONFIG_ENGINE = 300,
  PLAN_CONFIG = 401,
  PLAN_WORKSPACE_SIZE = 402,
  FORWARD_W = 703,
  BACKWARD_DATA_W = 709,
  BACKWARD_FILTER_W = 715,
  GRAPH_OPERATIONS = 801,
  GRAPH_ENGINE_COUNT = 802,
  TENSOR_TYPE = 901,
  TENSOR_SIZES = 902,
  TENSOR_STRIDES = 903,
  ENGINE_GRAPH = 1300,
  ENGINE_INDEX = 1301
};

// What a descriptor describes. Those that refer to it keep it, whatever becomes of the program's handle.
struct Content;
using Kept = std::shared_ptr<Content>;
struct Attribute {
  int64_t count = 0;
  std::vector<char> bytes;
  std::vector<Kept> descriptors;
};
struct Content {
  int kind;
  std::map<int, Attribute> attributes;

  Kept descriptor(int name) const {
    auto it = attributes.find(name);
    return it == attributes.end() || it->second.descriptors.empty() ? nullptr : it->second.descriptors[0];
  }
  template <class T>
  std::vector<T> values(int name) const {
    auto it = attributes.find(name);
    if (it == attributes.end()) return {};
    std::vector<T> found(it->second.bytes.size() / sizeof(T));
    memcpy(found.data(), it->second.bytes.data(), found.size() * sizeof(T));
    return found;
  }
};
struct Handle {
  Kept content;
};

size_t size_of(int type) {
  switch (type) {
    case BOOLEAN:
    case CHAR: return 1;
    case HANDLE:
    case INT64:
    case DOUBLE:
    case POINTER: return 8;
    case FRACTION: return 16;
    default: return 4;  // float, int32 and enumerations
  }
}

size_t size_of_data(int type) {
  switch (type) {
    case 1:             // double
    case 10: return 8;  // int64
    case 0:             // float
    case 4: return 4;   // int32
    case 2:             // half
    case 9: return 2;   // bfloat16
    default: return 1;
  }
}

// Bytes of a tensor if its channels aren't innermost, otherwise 0.
int64_t to_transpose(const Content& tensor) {
  auto sizes = tensor.values<int64_t>(TENSOR_SIZES), strides = tensor.values<int64_t>(TENSOR_STRIDES);
  auto type = tensor.values<int>(TENSOR_TYPE);
  if (sizes.size() < 3 || strides.size() != sizes.size() || type.empty()) return 0;
  bool points = std::all_of(sizes.begin() + 2, sizes.end(), [](int64_t n) { return n == 1; });
  if (points || strides[1] == 1) return 0;
  int64_t bytes = size_of_data(type[0]);
  for (int64_t n : sizes) bytes *= n;
  return bytes;
}

// cuDNN's kernels for tensor cores want channels innermost: what isn't so is copied to a workspace first. That real
// plans take just this is not known.
struct Convolution {
  Kept operation;
  int weights =
      0;  // the number of their attribute; those of the other two tensors follow, the output's or its gradient's last
};
Convolution convolution_of(const Content& plan) {
  Kept config = plan.descriptor(PLAN_CONFIG);
  Kept engine = config ? config->descriptor(CONFIG_ENGINE) : nullptr;
  Kept graph = engine ? engine->descriptor(ENGINE_GRAPH) : nullptr;
  Kept operation = graph ? graph->descriptor(GRAPH_OPERATIONS) : nullptr;
  if (!operation) return {};
  int weights = operation->kind == FORWARD           ? FORWARD_W
                : operation->kind == BACKWARD_DATA   ? BACKWARD_DATA_W
                : operation->kind == BACKWARD_FILTER ? BACKWARD_FILTER_W
                                                     : 0;
  return {operation, weights};
}
int64_t workspace_size(const Content& plan) {
  Convolution it = convolution_of(plan);
  int64_t bytes = 0;
  for (int name = it.weights; it.weights && name < it.weights + 3; ++name)
    if (Kept tensor = it.operation->descriptor(name)) bytes += to_transpose(*tensor);
  return bytes;
}

// Each element of the output is a sum over the weights of one of its channels.
void take_time(const Content& plan, void* stream) {
  Convolution it = convolution_of(plan);
  Kept weights = it.weights ? it.operation->descriptor(it.weights) : nullptr;
  Kept output = it.weights ? it.operation->descriptor(it.weights + 2) : nullptr;
  if (!weights || !output) return;
  auto filters = weights->values<int64_t>(TENSOR_SIZES), results = output->values<int64_t>(TENSOR_SIZES);
  if (filters.empty() || results.size() < 2) return;
  double summed = 1, places = 1;
  for (size_t i = 1; i < filters.size(); ++i) summed *= filters[i];
  for (size_t i = 0; i < results.size(); ++i) places *= i == 1 ? 1 : results[i];
  fakecuda_product(stream, places, results[1], summed, 1, size_of_data(weights->values<int>(TENSOR_TYPE)[0]), 1);
}

// The one engine that there is for a graph, or the one configuration of it.
Kept engine_of(const Kept& graph) {
  Kept engine(new Content{ENGINE, {}});
  engine->attributes[ENGINE_GRAPH] = {1, {}, {graph}};
  return engine;
}
Kept config_of(const Kept& graph) {
  Kept config(new Content{ENGINE_CONFIG, {}});
  config->attributes[CONFIG_ENGINE] = {1, {}, {engine_of(graph)}};
  return config;
}

// What a library knows by itself.
Attribute computed(const Content& of, int name) {
  int64_t value = 0;
  switch (name) {
    case HEURISTICS_RESULTS: return {1, {}, {config_of(of.descriptor(HEURISTICS_GRAPH))}};
    case GRAPH_ENGINE_COUNT: value = 1; break;
    case PLAN_WORKSPACE_SIZE: value = workspace_size(of); break;
    case ENGINE_INDEX: break;
    default: return {};
  }
  auto* bytes = reinterpret_cast<char*>(&value);
  return {1, {bytes, bytes + sizeof value}, {}};
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return 13000; }
int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? CUDNN_VERSION / 10000 : which == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
  return SUCCESS;
}
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}
const char* cudnnGetErrorString(int status) { return status ? "not supported by the stand-in" : "success"; }

int cudnnBackendCreateDescriptor(int kind, Handle** out) {
  *out = new Handle{Kept(new Content{kind, {}})};
  return SUCCESS;
}
int cudnnBackendDestroyDescriptor(Handle* it) {
  delete it;
  return SUCCESS;
}
int cudnnBackendFinalize(Handle*) { return SUCCESS; }
int cudnnSetStream(void* handle, void* stream) {
  std::lock_guard<std::mutex> hold(lock);
  streams[handle] = stream;
  return SUCCESS;
}
int cudnnBackendExecute(void* handle, Handle* plan, Handle*) {
  std::lock_guard<std::mutex> hold(lock);
  take_time(*plan->content, streams[handle]);
  return SUCCESS;
}

int cudnnBackendSetAttribute(Handle* it, int name, int type, int64_t count, const void* elements) {
  Attribute& attribute = it->content->attributes[name] = {};
  attribute.count = count;
  if (type == DESCRIPTOR) {
    auto* handles = static_cast<Handle* const*>(elements);
    for (int64_t i = 0; i < count; ++i) attribute.descriptors.push_back(handles[i] ? handles[i]->content : nullptr);
  } else {
    auto* bytes = static_cast<const char*>(elements);
    attribute.bytes.assign(bytes, bytes + count * size_of(type));
  }
  return SUCCESS;
}

// `wanted` is how many elements there is room for; `count`, if given, tells how many there are.
int cudnnBackendGetAttribute(Handle* it, int name, int type, int64_t wanted, int64_t* count, void* elements) {
  auto found = it->content->attributes.find(name);
  Attribute attribute = found == it->content->attributes.end() ? computed(*it->content, name) : found->second;
  if (count) *count = attribute.count;
  if (!elements) return SUCCESS;
  int64_t given = std::min(wanted, attribute.count);
  if (type == DESCRIPTOR) {
    auto* handles = static_cast<Handle**>(elements);
    for (int64_t i = 0; i < given; ++i) handles[i]->content = attribute.descriptors[i];
  } else {
    memcpy(elements, attribute.bytes.data(), given * size_of(type));
  }
  return SUCCESS;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*,
                                                             size_t* bytes) {
  *bytes = 0;
  return SUCCESS;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*,
                                                      size_t* bytes) {
  *bytes = 0;
  return SUCCESS;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes) {
  *bytes = 0;
  return SUCCESS;
}

int cudnnSetRNNDescriptor_v8() { return NOT_SUPPORTED; }
int cudnnDropoutGetStatesSize() { return NOT_SUPPORTED; }
int cudnnGetCTCLossWorkspaceSize() { return NOT_SUPPORTED; }
int cudnnGetCTCLossWorkspaceSize_v8() { return NOT_SUPPORTED; }
}
