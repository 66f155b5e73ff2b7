// What torch hands to a kernel of an op, in the order of the op's schema. It is looked at here and stays
// the stack's until `release`: a call that is not ours goes on to Python as it came.
#pragma once
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../args.h"

// A tensor whose sizes and strides are where torch keeps them.
struct TensorView {
  AtenTensorHandle handle = nullptr;
  int64_t rank = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1, device = -1, device_index = -1;

  explicit operator bool() const { return handle != nullptr; }
  void* data() const {
    void* address = nullptr;
    if (handle) aoti_torch_get_data_ptr(handle, &address);
    return address;
  }
};

static TensorView view_of(AtenTensorHandle handle) {
  TensorView x;
  x.handle = handle;
  if (!handle) return x;
  aoti_torch_get_dim(handle, &x.rank);
  aoti_torch_get_sizes(handle, &x.sizes);
  aoti_torch_get_strides(handle, &x.strides);
  aoti_torch_get_dtype(handle, &x.dtype);
  aoti_torch_get_device_type(handle, &x.device);
  aoti_torch_get_device_index(handle, &x.device_index);
  return x;
}

// The number by which the kernels know a dtype; -1: they do not.
static int64_t dtype_code(const TensorView& x) {
  static const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float8_e4m3fn(),
                                  aoti_torch_dtype_float8_e5m2()};
  for (int64_t code = 0; code < 5; ++code)
    if (x.dtype == known[code]) return code;
  return -1;
}

// Arguments of a schema. `kinds` has a letter for each: T a tensor of one row a token, W any other tensor,
// t and w the same where they may be absent, P a tensor whose place in memory matters, f a number, i an integer
// that changes nothing here, n one that does, j an integer or none, b a truth value, s a string.
struct Arguments {
  StableIValue* stack;
  const char* kinds;
  int count;
  TensorView tensors[32];  // of arguments that are none, or absent: no tensor

  Arguments(StableIValue* stack, const char* kinds) : stack(stack), kinds(kinds), count(0) {
    for (; kinds[count]; ++count) {
      const char kind = kinds[count];
      if (kind == 'T' || kind == 'W' || kind == 'P') tensors[count] = view_of(as<AtenTensorHandle>(stack[count]));
      if ((kind == 't' || kind == 'w') && stack[count])
        tensors[count] = view_of(as<AtenTensorHandle>(given(count)));
    }
  }

  template <class X>
  static X as(StableIValue value) { return torch::stable::detail::to<X>(value); }
  StableIValue given(int i) const { return *as<StableIValue*>(stack[i]); }  // of what may be absent, and is not
  const TensorView& tensor(int i) const { return tensors[i]; }
  double number(int i) const { return as<double>(stack[i]); }
  bool truth(int i) const { return as<bool>(stack[i]); }
  int64_t integer(int i) const { return stack[i] ? as<int64_t>(given(i)) : 0; }  // 0 for none
  const char* text(int i) const {
    const char* characters = nullptr;
    torch_string_c_str(as<StringHandle>(stack[i]), &characters);
    return characters;
  }
  void release() const {
    for (int i = 0; i < count; ++i) {
      const char kind = kinds[i];
      if (tensors[i]) aoti_torch_delete_tensor_object(tensors[i].handle);
      if (kind == 's') torch_delete_string(as<StringHandle>(stack[i]));
      if (kind == 't' || kind == 'w' || kind == 'j') delete as<StableIValue*>(stack[i]);
    }
  }
};
