// `cpu_linear`: products that the kernels compute while an engine serves; all others are Python's.
#pragma once
#include "known_calls.h"

// Set once by Python.
struct Kernels {
  int64_t (*attention)(const AttentionArgs*);
  int64_t (*cache_write)(const WriteArgs*);
  void (*linear)(const LinearArgs*);
};
static Kernels kernels = {};

static const char LINEAR[] = "WWw";
static thread_local bool serves_linear = false;

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

static AtenTensorHandle multiply(const TensorView& x, const TensorView& weight, const TensorView& bias) {
  LinearArgs a = {x.data(), weight.data(), bias.data()};
  a.outputs = weight.sizes[0];
  a.inputs = a.x_row = a.weight_row = weight.sizes[1];
  a.rows = 1;
  for (int64_t i = 0; i + 1 < x.rank; ++i) a.rows *= x.sizes[i];
  if (!a.rows || !a.outputs || !a.inputs || a.inputs % LINEAR_MULTIPLE) return nullptr;
  std::vector<int64_t> sizes(x.sizes, x.sizes + x.rank), strides(x.rank, 1);
  sizes.back() = a.outputs;
  for (int64_t i = x.rank - 2; i >= 0; --i) strides[i] = strides[i + 1] * sizes[i + 1];
  AtenTensorHandle output = nullptr;
  aoti_torch_empty_strided(x.rank, sizes.data(), strides.data(), x.dtype, x.device, 0, &output);
  if (!output) return nullptr;
  a.output = view_of(output).data();
  a.dtype = dtype_code(x);
  a.threads = num_threads();
  kernels.linear(&a);
  return output;
}

static AtenTensorHandle serve_linear(const Arguments& call) {
  if (!serves_linear || !kernels.linear || aoti_torch_grad_mode_is_enabled()) return nullptr;
  const TensorView x = call.tensor(0), weight = call.tensor(1), bias = call.tensor(2);
  return fits(x, weight, bias) ? multiply(x, weight, bias) : nullptr;
}

static void linear(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack, LINEAR);
  AtenTensorHandle output = serve_linear(call);
  if (!output) return void(call_python("attnbackend_python::cpu_linear", call, true));
  call.release();
  stack[0] = torch::stable::detail::from(output);
}
