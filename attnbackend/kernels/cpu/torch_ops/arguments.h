// What torch hands to a kernel of an op, in the order of the op's schema. It is looked at here and stays
// the stack's until `release`: a call that is not ours goes on to Python as it came.
#pragma once
#include <torch/library.h>

#include <vector>

#include "../args.h"

// A tensor whose sizes and strides are where torch keeps them.
struct TensorView {
  const at::Tensor* tensor = nullptr;
  int64_t rank = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::DeviceType device = c10::DeviceType::CPU;
  int32_t device_index = -1;

  explicit operator bool() const { return tensor != nullptr; }
  void* data() const { return tensor ? tensor->data_ptr() : nullptr; }
};

static TensorView view_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const c10::Device device = tensor.device();
  return {&tensor, tensor.dim(), tensor.sizes().data(), tensor.strides().data(), tensor.scalar_type(),
          device.type(), device.index()};
}

// The number by which the kernels know a dtype; -1: they do not.
static int64_t dtype_code(const TensorView& x) {
  switch (x.dtype) {
    case at::kFloat: return FLOAT32;
    case at::kHalf: return FLOAT16;
    case at::kBFloat16: return BFLOAT16;
    case at::kFloat8_e4m3fn: return E4M3FN;
    case at::kFloat8_e5m2: return E5M2;
    default: return -1;
  }
}

// Arguments of a schema. `kinds` has a letter for each: T a tensor of one row a token, W any other tensor,
// t and w the same where they may be absent, P a tensor whose place in memory matters, f a number, i an integer
// that changes nothing here, n one that does, j an integer or none, b a truth value, s a string.
struct Arguments {
  torch::jit::Stack& stack;
  const char* kinds;
  const int count;
  const size_t first;
  TensorView tensors[32];  // of arguments that are none, or absent: no tensor

  Arguments(torch::jit::Stack& stack, const char* kinds)
      : stack(stack), kinds(kinds), count(static_cast<int>(std::strlen(kinds))), first(stack.size() - count) {
    for (int i = 0; i < count; ++i)
      if (value(i).isTensor()) tensors[i] = view_of(value(i).toTensor());
  }

  const c10::IValue& value(int i) const { return stack[first + i]; }
  const TensorView& tensor(int i) const { return tensors[i]; }
  double number(int i) const { return value(i).toDouble(); }
  bool truth(int i) const { return value(i).toBool(); }
  int64_t integer(int i) const { return value(i).isNone() ? 0 : value(i).toInt(); }
  const std::string& text(int i) const { return value(i).toStringRef(); }
  // What the op returns takes their place.
  template <class... Results>
  void release(Results... results) const {
    torch::jit::drop(stack, count);
    torch::jit::push(stack, std::move(results)...);
  }
};
