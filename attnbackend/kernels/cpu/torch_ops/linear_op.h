// Products that the kernels compute while an engine serves; all others are Python's.
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

static const char LINEAR[] = "WWw", LINEARS[] = "WWWwwww", GATED_LINEAR[] = "WWWww";
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
  if (!x.sizes[x.rank - 1] || x.sizes[x.rank - 1] % LINEAR_MULTIPLE || !weight.sizes[0]) return false;
  return !bias || (bias.dtype == x.dtype && bias.rank == 1 && bias.sizes[0] == weight.sizes[0] && is_dense(bias));
}

// Products of the first argument with `count` weights that follow, and biases behind `most` of those. None where
// they are Python's.
static std::vector<at::Tensor> multiply(const Arguments& call, int count, int most, bool gated) {
  const TensorView x = call.tensor(0);
  LinearArgs a = {x.data()};
  a.rows = 1;
  for (int64_t i = 0; i + 1 < x.rank; ++i) a.rows *= x.sizes[i];
  if (!serves_linear || !kernels.linear || at::GradMode::is_enabled() || !a.rows) return {};
  for (int i = 1; i <= count; ++i)
    if (!fits(x, call.tensor(i), call.tensor(i + most))) return {};
  if (gated && call.tensor(1).sizes[0] != call.tensor(2).sizes[0]) return {};
  std::vector<at::Tensor> outputs;
  for (int i = 1; i <= count; ++i) {
    const TensorView weight = call.tensor(i);
    c10::SmallVector<int64_t, 8> sizes(x.sizes, x.sizes + x.rank);
    sizes.back() = weight.sizes[0];
    if (i == 1 || !gated) outputs.push_back(at::detail::empty_cpu(sizes, x.dtype));
    a.parts[i - 1] = {weight.data(), call.tensor(i + most).data(), outputs.back().data_ptr(), weight.sizes[0]};
  }
  a.num_parts = count;
  a.gated = gated;
  a.inputs = x.sizes[x.rank - 1];
  a.dtype = dtype_code(x);
  a.threads = at::get_num_threads();
  kernels.linear(&a);
  return outputs;
}

static void linear(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments call(*stack, LINEAR);
  std::vector<at::Tensor> outputs = multiply(call, 1, 1, false);
  if (outputs.empty()) return void(call_python("attnbackend_python::cpu_linear", call));
  call.release();
  stack->emplace_back(std::move(outputs[0]));
}

static void linears(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments call(*stack, LINEARS);
  std::vector<at::Tensor> outputs = multiply(call, call.tensor(3) ? 3 : 2, 3, false);
  if (outputs.empty()) return void(call_python("attnbackend_python::cpu_linears", call));
  call.release();
  stack->emplace_back(std::move(outputs));
}

static void gated_linear(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments call(*stack, GATED_LINEAR);
  std::vector<at::Tensor> outputs = multiply(call, 2, 2, true);
  if (outputs.empty()) return void(call_python("attnbackend_python::cpu_gated_linear", call));
  call.release();
  stack->emplace_back(std::move(outputs[0]));
}
