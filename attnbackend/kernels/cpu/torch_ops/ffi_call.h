// A call of a compiled function that takes its arguments by tvm-ffi, as FlashInfer's do.
#pragma once
#include "lesson.h"

// As in tvm/ffi/c_api.h, whose layout is fixed, and dlpack.h.
struct FfiValue {
  int32_t type;
  uint32_t padding;
  int64_t bits;  // a number, or a pointer
};
enum FfiType : int32_t { FFI_NONE = 0, FFI_TENSOR = 7, FFI_FIRST_OBJECT = 64 };
struct FfiTensor {
  void* data;
  int32_t device, device_index, rank;
  uint8_t kind, bits;
  uint16_t lanes;
  const int64_t *sizes, *strides;
  uint64_t offset;
};
enum FfiDevice : int32_t { FFI_CPU = 1, FFI_CUDA = 2 };

// The library's functions and one of torch's for CUDA. Set once by Python.
struct Ffi {
  int (*call)(void* function, FfiValue* arguments, int32_t count, FfiValue* result);
  int (*set_stream)(int32_t device, int32_t device_index, void* stream, void** before);
  int (*keep)(void* object);
  int (*release)(void* object);
  int32_t (*current_stream)(int32_t device_index, void** stream);
};
static Ffi ffi = {};

class FfiCall : public Lesson {
 public:
  FfiCall(void* function, const Part* parts, int64_t count) : Lesson(parts, count), function(function) {
    ffi.keep(function);
    for (const Part& part : this->parts)
      if (is_object(part)) ffi.keep(reinterpret_cast<void*>(part.value));
  }
  ~FfiCall() override {
    ffi.release(function);
    for (const Part& part : parts)
      if (is_object(part)) ffi.release(reinterpret_cast<void*>(part.value));
  }

  bool make(const Arguments& call) const override {
    FfiValue values[MOST_PARTS];
    FfiTensor tensors[MOST_PARTS];
    Half halves[2];
    for (size_t i = 0; i < parts.size(); ++i) values[i] = value_of(parts[i], call, tensors[i], halves);
    const TensorView& query = call.tensor(0);
    const bool on_cuda = query.device == c10::DeviceType::CUDA;
    void *stream = nullptr, *before = nullptr;
    if (on_cuda && ffi.current_stream(query.device_index, &stream)) return false;
    if (on_cuda && ffi.set_stream(FFI_CUDA, query.device_index, stream, &before)) return false;
    FfiValue result = {};
    const int failed = ffi.call(function, values, static_cast<int32_t>(parts.size()), &result);
    if (on_cuda) ffi.set_stream(FFI_CUDA, query.device_index, before, nullptr);
    if (!failed && result.type >= FFI_FIRST_OBJECT) ffi.release(reinterpret_cast<void*>(result.bits));
    return !failed;
  }

 private:
  void* const function;

  static bool is_object(const Part& part) { return part.kind == Part::CONSTANT && part.type >= FFI_FIRST_OBJECT; }

  static FfiValue value_of(const Part& part, const Arguments& call, FfiTensor& tensor, Half* halves) {
    if (part.kind == Part::ABSENT) return {FFI_NONE, 0, 0};
    if (part.kind == Part::CONSTANT) return {static_cast<int32_t>(part.type), 0, part.value};
    set(tensor, call.tensor(part.value));
    if (part.kind == Part::HALF) {
      Half& half = halves[part.half];
      half.set(call.tensor(part.value), part.half);
      tensor.data = static_cast<char*>(tensor.data) + half.first * tensor.bits / 8;
      tensor.rank = static_cast<int32_t>(half.rank);
      tensor.sizes = half.sizes;
      tensor.strides = half.strides;
    }
    return {FFI_TENSOR, 0, reinterpret_cast<int64_t>(&tensor)};
  }

  static void set(FfiTensor& tensor, const TensorView& x) {
    tensor = {x.data(), x.device == c10::DeviceType::CUDA ? FFI_CUDA : FFI_CPU, x.device_index};
    if (tensor.device_index < 0) tensor.device_index = 0;
    tensor.rank = static_cast<int32_t>(x.rank);
    tensor.sizes = x.sizes;
    tensor.strides = x.strides;
    tensor.lanes = 1;
    struct {
      at::ScalarType dtype;
      uint8_t kind, bits;  // 0 signed, 1 unsigned, 2 float, 4 bfloat, 10 and 12 float8
    } const known[] = {{at::kInt, 0, 32},   {at::kByte, 1, 8},      {at::kFloat, 2, 32},
                       {at::kHalf, 2, 16},  {at::kBFloat16, 4, 16}, {at::kLong, 0, 64},
                       {at::kFloat8_e4m3fn, 10, 8},                 {at::kFloat8_e5m2, 12, 8}};
    for (const auto& type : known)
      if (type.dtype == x.dtype) tensor.kind = type.kind, tensor.bits = type.bits;
  }
};
