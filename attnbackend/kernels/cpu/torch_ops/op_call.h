// A call of another op of torch.
#pragma once
#include <torch/csrc/inductor/inductor_ops.h>

#include "lesson.h"

class OpCall : public Lesson {
 public:
  OpCall(const char* op, const char* overload, const Part* parts, int64_t count)
      : Lesson(parts, count), op(c10::Dispatcher::singleton().findSchemaOrThrow(op, overload)) {}

  bool make(const Arguments& call) const override {
    torch::jit::Stack stack;
    stack.reserve(MOST_PARTS);
    for (size_t i = 0; i < parts.size(); ++i) stack.push_back(argument_of(parts[i], call, i));
    try {
      op.callBoxed(&stack);
    } catch (const c10::Error&) {  // what an op in Python raised, such as Ctrl-C, goes on as it is
      return false;
    }
    return true;
  }

 private:
  const c10::OperatorHandle op;

  c10::IValue argument_of(const Part& part, const Arguments& call, size_t i) const {
    switch (part.kind) {
      case Part::ABSENT: return {};
      case Part::CONSTANT: return constant(*op.schema().arguments()[i].type(), part.value);
      case Part::HELD: return *part.held();
      case Part::ARGUMENT: return *call.tensor(part.value).tensor;
      default: return half_of(call.tensor(part.value), part.half);
    }
  }

  static c10::IValue constant(const c10::Type& type, int64_t bits) {
    if (const auto* optional = type.castRaw<c10::OptionalType>()) return constant(*optional->getElementType(), bits);
    if (type.kind() == c10::TypeKind::BoolType) return bits != 0;
    if (type.kind() != c10::TypeKind::FloatType) return bits;
    double number = 0;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  static at::Tensor half_of(const TensorView& cache, int64_t which) {
    Half half;
    half.set(cache, which);
    const size_t rank = static_cast<size_t>(half.rank);
    return torch::inductor::_reinterpret_tensor(*cache.tensor, {half.sizes, rank}, {half.strides, rank}, half.first);
  }
};
