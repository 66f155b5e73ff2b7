// `packed_linear`: few rows by the kernel for them, many by oneDNN with the weight that Python packed.
#pragma once
#include <mutex>

#include "known_calls.h"

// Set once by Python.
struct Kernels {
  int64_t (*attention)(const AttentionArgs*);
  int64_t (*cache_write)(const WriteArgs*);
  void (*linear)(const LinearArgs*);
};
static Kernels kernels = {};

// Of torch's C interface, where torch has oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, const char*, const double**, int64_t, const char**,
    AtenTensorHandle*);

static const char LINEAR[] = "WWw";
constexpr int64_t MOST_LINEAR_ROWS = 16;  // from there on oneDNN is the faster one
static thread_local bool serves_linear = false;

// Whether Python found, since the step began, that packed weights still are what they were made of.
static thread_local bool packed_is_valid = false;

struct PackedWeight {
  AtenTensorHandle packed;
  int64_t outputs, inputs;
};
static std::mutex packed_mutex;
static std::unordered_map<const void*, PackedWeight> packed_weights;  // by the weight's address

static void forget_packed(const void* weight) {
  const std::lock_guard<std::mutex> lock(packed_mutex);
  const auto found = packed_weights.find(weight);
  if (found == packed_weights.end()) return;
  aoti_torch_delete_tensor_object(found->second.packed);
  packed_weights.erase(found);
}

// (weight, packed): takes the packed one over.
static void keep_packed(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack, "WW");
  const TensorView weight = call.tensor(0);
  forget_packed(weight.data());
  const std::lock_guard<std::mutex> lock(packed_mutex);
  packed_weights[weight.data()] = {call.tensor(1).handle, weight.sizes[0], weight.sizes[1]};
  aoti_torch_delete_tensor_object(weight.handle);
}

// All of a tensor's elements lie in order without gaps.
static bool is_dense(const TensorView& x) {
  int64_t expected = 1;
  for (int64_t i = x.rank - 1; i >= 0; --i) {
    if (x.sizes[i] != 1 && x.strides[i] != expected) return false;
    expected *= x.sizes[i];
  }
  return true;
}

static bool fits(const TensorView& x, const TensorView& weight, const TensorView& bias) {
  const int64_t dtype = dtype_code(x);
  if (x.rank < 1 || weight.rank != 2 || dtype < 0 || dtype > BFLOAT16 || weight.dtype != x.dtype) return false;
  if (x.sizes[x.rank - 1] != weight.sizes[1] || !is_dense(x) || !is_dense(weight)) return false;
  return !bias || (bias.dtype == x.dtype && bias.rank == 1 && bias.sizes[0] == weight.sizes[0] && is_dense(bias));
}

// A handle of the caller's own to what the weight was packed to; null where it was not.
static AtenTensorHandle packed_of(const TensorView& weight) {
  const std::lock_guard<std::mutex> lock(packed_mutex);
  const auto found = packed_weights.find(weight.data());
  if (found == packed_weights.end()) return nullptr;
  const PackedWeight& known = found->second;
  AtenTensorHandle own = nullptr;
  if (known.outputs == weight.sizes[0] && known.inputs == weight.sizes[1])
    aoti_torch_new_tensor_handle(known.packed, &own);
  return own;
}

static AtenTensorHandle multiply_packed(const TensorView& x, const TensorView& weight, const TensorView& bias) {
  if (!packed_is_valid || !aoti_torch_cpu__linear_pointwise) return nullptr;
  const AtenTensorHandle packed = packed_of(weight);
  if (!packed) return nullptr;
  AtenTensorHandle output = nullptr, b = bias.handle;
  const char* algorithm = "";
  aoti_torch_cpu__linear_pointwise(x.handle, packed, b ? &b : nullptr, "none", nullptr, 0, &algorithm, &output);
  aoti_torch_delete_tensor_object(packed);
  return output;
}

static AtenTensorHandle multiply_few(const TensorView& x, const TensorView& weight, const TensorView& bias,
                                     int64_t rows) {
  const int64_t inputs = weight.sizes[1], outputs = weight.sizes[0];
  if (!rows || !outputs || !inputs || inputs % LINEAR_MULTIPLE) return nullptr;
  std::vector<int64_t> sizes(x.sizes, x.sizes + x.rank), strides(x.rank, 1);
  sizes.back() = outputs;
  for (int64_t i = x.rank - 2; i >= 0; --i) strides[i] = strides[i + 1] * sizes[i + 1];
  AtenTensorHandle output = nullptr;
  aoti_torch_empty_strided(x.rank, sizes.data(), strides.data(), x.dtype, x.device, 0, &output);
  if (!output) return nullptr;
  LinearArgs a = {x.data(), weight.data(), bias.data(), view_of(output).data()};
  a.rows = rows;
  a.outputs = outputs;
  a.inputs = a.x_row = a.weight_row = inputs;
  a.dtype = dtype_code(x);
  a.threads = num_threads();
  kernels.linear(&a);
  return output;
}

static AtenTensorHandle serve_linear(const Arguments& call) {
  if (!serves_linear || !kernels.linear || aoti_torch_grad_mode_is_enabled()) return nullptr;
  const TensorView x = call.tensor(0), weight = call.tensor(1), bias = call.tensor(2);
  if (!fits(x, weight, bias)) return nullptr;
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.rank; ++i) rows *= x.sizes[i];
  return rows > MOST_LINEAR_ROWS ? multiply_packed(x, weight, bias) : multiply_few(x, weight, bias, rows);
}

static void linear(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack, LINEAR);
  AtenTensorHandle output = serve_linear(call);
  if (!output) return void(call_python("attnbackend_python::packed_linear", call, true));
  call.release();
  stack[0] = torch::stable::detail::from(output);
}
