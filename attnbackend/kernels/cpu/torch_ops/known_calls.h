// Which calls may skip Python: those that Python checked and served once. What a call may depend on beside
// the number of tokens and what the tensors hold is its signature.
#pragma once
#include <ATen/Parallel.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

#include "arguments.h"

// Set once by Python, before which every call is Python's.
struct Numbers {
  const volatile int64_t* python_only;  // above 0 while something is in force that Python alone honours
  const volatile int64_t* epoch;        // moves when what is known of calls may no longer hold
};
static Numbers numbers = {};

static thread_local bool teaches;  // whether the call that Python was given last stands for others like it

typedef std::vector<int64_t> Signature;
struct HashOfSignature {
  size_t operator()(const Signature& words) const {
    uint64_t hash = 1469598103934665603u;
    for (const int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};
// `Way` says how known calls are served: its `Lesson` is what is known of a call beside that it may skip Python.
template <class Way>
struct KnownCalls {
  std::unordered_map<Signature, typename Way::Lesson, HashOfSignature> lessons;
  int64_t epoch = -1;
};
constexpr size_t MOST_KNOWN_CALLS = 4096;

static void add_tensor(Signature& words, const TensorView& x, bool has_token_rows) {
  words.insert(words.end(), {x.rank, static_cast<int64_t>(x.dtype), static_cast<int64_t>(x.device),
                             x.device_index});
  for (int64_t i = has_token_rows; i < x.rank; ++i) words.push_back(x.sizes[i]);
  for (int64_t i = 0; i < x.rank; ++i) words.push_back(x.strides[i]);
}

static void add_text(Signature& words, const char* text, size_t length) {
  words.push_back(static_cast<int64_t>(length));
  words.resize(words.size() + (length + 7) / 8);
  std::memcpy(words.data() + words.size() - (length + 7) / 8, text, length);
}

static void add_number(Signature& words, double number) {
  words.emplace_back();
  std::memcpy(&words.back(), &number, sizeof number);
}

static void sign(Signature& words, const Arguments& call) {
  words.clear();
  for (int i = 0; i < call.count; ++i) {
    const TensorView& x = call.tensor(i);
    switch (call.kinds[i]) {
      case 'i': break;
      case 's': add_text(words, call.text(i).data(), call.text(i).size()); break;
      case 'f': add_number(words, call.number(i)); break;
      case 'b': words.push_back(call.truth(i)); break;
      case 'j': words.push_back(!call.value(i).isNone()); [[fallthrough]];
      case 'n': words.push_back(call.integer(i)); break;
      case 'P': words.push_back(reinterpret_cast<int64_t>(x.data())); [[fallthrough]];
      default: add_tensor(words, x, x && (call.kinds[i] == 'T' || call.kinds[i] == 't'));
    }
  }
}

// Gradients are Python's to refuse, checks of contents Python's to make.
static bool is_for_python() {
  if (!numbers.epoch || *numbers.python_only || at::GradMode::is_enabled()) return true;
  const char* debug = std::getenv("ATTNBACKEND_DEBUG");
  return debug && *debug && std::strcmp(debug, "0");
}

// The same call through the op `general`, which is Python. Whether it teaches.
static bool call_python(const char* general, const Arguments& call) {
  teaches = false;
  c10::Dispatcher::singleton().findSchemaOrThrow(general, "").callBoxed(&call.stack);
  return teaches;
}

// Runs a call by `Way::serve`, which releases its arguments or says false where Python has to, or through Python, and
// learns from it.
template <class Way>
static void run(const char* general, const Arguments& call, KnownCalls<Way>& known) {
  static thread_local Signature words;
  const auto leave_to_python = [&] {
    call_python(general, call);
    Way::take_lesson();  // nobody's
  };
  if (is_for_python()) return leave_to_python();
  sign(words, call);
  Way::sign_more(words);
  if (known.epoch != *numbers.epoch || known.lessons.size() >= MOST_KNOWN_CALLS) {
    known.lessons.clear();
    known.epoch = *numbers.epoch;
  }
  const auto found = known.lessons.find(words);
  if (found != known.lessons.end()) {
    if (!Way::serve(found->second, call)) leave_to_python();
    return;
  }
  Signature learned = words;  // Python may call further ops on this thread
  if (call_python(general, call)) known.lessons.emplace(std::move(learned), Way::take_lesson());
}

extern "C" {
void attnbackend_ops_share_numbers(const Numbers* from_python) { numbers = *from_python; }
void attnbackend_ops_teaches() { teaches = true; }
}
