// A call of another op of torch.
#pragma once
#include "lesson.h"

class OpCall : public Lesson {
 public:
  OpCall(const char* op, const char* overload, const char* results, const Part* parts, int64_t count)
      : Lesson(parts, count), op(op), overload(overload), results(results) {}

  bool make(const Arguments& call) const override {
    StableIValue stack[MOST_PARTS];
    for (size_t i = 0; i < parts.size(); ++i) stack[i] = argument_of(parts[i], call);
    if (torch_call_dispatcher(op.c_str(), overload.c_str(), stack, TORCH_ABI_VERSION)) return false;
    for (size_t i = 0; i < results.size(); ++i) drop(stack[i], results[i]);
    return true;
  }

 private:
  const std::string op, overload, results;  // results: T a tensor, L a list of tensors

  // What goes on the stack of the op, which takes it over.
  static StableIValue argument_of(const Part& part, const Arguments& call) {
    if (part.kind == Part::ABSENT) return 0;
    StableIValue value = static_cast<StableIValue>(part.value);
    if (part.kind != Part::CONSTANT) value = torch::stable::detail::from(tensor_of(part, call));
    return part.type ? torch::stable::detail::from(new StableIValue(value)) : value;
  }

  static AtenTensorHandle tensor_of(const Part& part, const Arguments& call) {
    AtenTensorHandle own = nullptr;
    if (part.kind == Part::HALF) {
      const TensorView& cache = call.tensor(part.value);
      Half half;
      half.set(cache, part.half);
      aoti_torch__reinterpret_tensor(cache.handle, half.rank, half.sizes, half.strides, half.first, &own);
    } else {
      const bool is_held = part.kind == Part::HELD;
      aoti_torch_new_tensor_handle(is_held ? part.held() : call.tensor(part.value).handle, &own);
    }
    return own;
  }

  static void drop(StableIValue result, char kind) {
    if (kind == 'T') return void(aoti_torch_delete_tensor_object(Arguments::as<AtenTensorHandle>(result)));
    const StableListHandle list = Arguments::as<StableListHandle>(result);
    size_t size = 0;
    torch_list_size(list, &size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element = 0;
      torch_list_get_item(list, i, &element);
      aoti_torch_delete_tensor_object(Arguments::as<AtenTensorHandle>(element));
    }
    torch_delete_list(list);
  }
};
