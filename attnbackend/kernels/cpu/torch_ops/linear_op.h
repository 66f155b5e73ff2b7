// `cpu_linear`: products that the kernels compute while an engine serves; all others are Python's.
#pragma once
#include <ATen/EmptyTensor.h>

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

// Undefined where it is Python's.
static at::Tensor multiply(const TensorView& x, const TensorView& weight, const TensorView& bias) {
  LinearArgs a = {x.data(), weight.data(), bias.data()};
  a.outputs = weight.sizes[0];
  a.inputs = a.x_row = a.weight_row = weight.sizes[1];
  a.rows = 1;
  for (int64_t i = 0; i + 1 < x.rank; ++i) a.rows *= x.sizes[i];
  if (!a.rows || !a.outputs || !a.inputs || a.inputs % LINEAR_MULTIPLE) return {};
  c10::SmallVector<int64_t, 8> sizes(x.sizes, x.sizes + x.rank);
  sizes.back() = a.outputs;
  at::Tensor output = at::detail::empty_cpu(sizes, x.dtype);
  a.output = output.data_ptr();
  a.dtype = dtype_code(x);
  a.threads = at::get_num_threads();
  kernels.linear(&a);
  return output;
}

static at::Tensor serve_linear(const Arguments& call) {
  if (!serves_linear || !kernels.linear || at::GradMode::is_enabled()) return {};
  const TensorView x = call.tensor(0), weight = call.tensor(1), bias = call.tensor(2);
  return fits(x, weight, bias) ? multiply(x, weight, bias) : at::Tensor();
}

static void linear(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments call(*stack, LINEAR);
  at::Tensor output = serve_linear(call);
  if (!output.defined()) return void(call_python("attnbackend_python::cpu_linear", call));
  call.release();
  stack->emplace_back(std::move(output));
}
