// What is known of a call of ours beside that it may skip Python: which call of a library it is.
#pragma once
#include <memory>

#include "known_calls.h"

// Where an argument of the library's function comes from. As in ops/library_calls.py.
struct Part {
  enum Kind : int64_t { ABSENT, CONSTANT, HELD, ARGUMENT, HALF };
  int64_t kind;   // HELD: of a torch op's
  int64_t type;   // of an ffi function's constant
  int64_t value;  // of a CONSTANT; the address of a HELD tensor; which of our arguments
  int64_t half;   // of a HALF: 0 keys, 1 values of a cache [blocks, 2, ...]

  at::Tensor* held() const { return reinterpret_cast<at::Tensor*>(value); }
};
constexpr int MOST_PARTS = 64, MOST_DIMENSIONS = 8;

// It owns the tensors that its parts hold.
struct Lesson {
  const std::vector<Part> parts;

  Lesson(const Part* given, int64_t count) : parts(given, given + count) {}
  Lesson(const Lesson&) = delete;
  Lesson& operator=(const Lesson&) = delete;
  virtual ~Lesson() {
    for (const Part& part : parts)
      if (part.kind == Part::HELD) delete part.held();
  }
  // False: it failed, and Python has the words for what is wrong.
  virtual bool make(const Arguments& call) const = 0;
};

// The sizes and strides of one half of a cache, and the element at which it begins.
struct Half {
  int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], rank, first;

  void set(const TensorView& cache, int64_t half) {
    rank = 0;
    first = half * cache.strides[1];
    for (int64_t i = 0; i < cache.rank; ++i) {
      if (i == 1) continue;
      sizes[rank] = cache.sizes[i];
      strides[rank++] = cache.strides[i];
    }
  }
};
