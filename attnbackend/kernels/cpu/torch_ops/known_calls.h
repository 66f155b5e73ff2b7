// Which calls may skip Python: those that Python checked and served once. What a call may depend on beside
// the number of tokens and what the tensors hold is its signature.
#pragma once
// Of one exception class torch's stable interface has none: this header is as of the torch that is compiled for.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <c10/util/Exception.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "arguments.h"

// Set once by Python, before which every call is Python's.
struct Numbers {
  const volatile int64_t* python_only;  // above 0 while something is in force that Python alone honours
  const volatile int64_t* epoch;        // moves when what is known of calls may no longer hold
};
static Numbers numbers = {};

// What Python says of the call that it was given last, thread by thread.
enum Verdict : int64_t { NONE, SERVED, TEACHES, INTERRUPTED, VALUE_ERROR, OUT_OF_MEMORY, RUNTIME_ERROR };
static thread_local int64_t verdict;
static thread_local std::string message;

extern "C" void PyErr_SetInterrupt();

static int64_t num_threads() {
  uint32_t n = 1;
  torch_get_num_threads(&n);
  return n;
}

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
  words.insert(words.end(), {x.rank, x.dtype, x.device, x.device_index});
  for (int64_t i = has_token_rows; i < x.rank; ++i) words.push_back(x.sizes[i]);
  for (int64_t i = 0; i < x.rank; ++i) words.push_back(x.strides[i]);
}

static void add_text(Signature& words, const char* text) {
  const size_t length = std::strlen(text);
  words.push_back(static_cast<int64_t>(length));
  words.resize(words.size() + (length + 7) / 8);
  std::memcpy(words.data() + words.size() - (length + 7) / 8, text, length);
}

static void sign(Signature& words, const Arguments& call) {
  words.clear();
  for (int i = 0; i < call.count; ++i) {
    const char kind = call.kinds[i];
    if (kind == 's') {
      add_text(words, call.text(i));
    } else if (kind == 'j') {
      words.insert(words.end(), {call.stack[i] != 0, call.integer(i)});
    } else if (kind == 'f' || kind == 'b' || kind == 'n') {
      words.push_back(static_cast<int64_t>(call.stack[i]));
    } else if (kind != 'i') {
      const TensorView& x = call.tensor(i);
      add_tensor(words, x, x && (kind == 'T' || kind == 't'));
      if (kind == 'P') words.push_back(reinterpret_cast<int64_t>(x.data()));
    }
  }
}

// Gradients are Python's to refuse, checks of contents Python's to make.
static bool is_for_python() {
  if (!numbers.epoch || *numbers.python_only || aoti_torch_grad_mode_is_enabled()) return true;
  const char* debug = std::getenv("ATTNBACKEND_DEBUG");
  return debug && *debug && std::strcmp(debug, "0");
}

// The same call through the op `general`, which is Python and says how it went. Whether it teaches.
static bool call_python(const char* general, const Arguments& call, bool returns_tensor = false) {
  verdict = NONE;
  const AOTITorchError failed = torch_call_dispatcher(general, "", call.stack, TORCH_ABI_VERSION);
  if (!failed && returns_tensor && verdict > INTERRUPTED)
    aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(call.stack[0]));
  if (verdict == VALUE_ERROR) throw std::invalid_argument(message);
  if (verdict == OUT_OF_MEMORY) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, message);
  if (verdict == RUNTIME_ERROR) throw std::runtime_error(message);
  if (verdict == INTERRUPTED) PyErr_SetInterrupt();  // Ctrl-C, once more when Python goes on
  if (failed || verdict == NONE) throw std::runtime_error(std::string(general) + " failed");
  return verdict == TEACHES;
}

// Runs a call by `Way::serve`, which says false where Python has to, or through Python, and learns from it.
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
    if (Way::serve(found->second, call)) return call.release();
    return leave_to_python();
  }
  Signature learned = words;  // Python may call further ops on this thread
  if (call_python(general, call)) known.lessons.emplace(std::move(learned), Way::take_lesson());
}

extern "C" {
void attnbackend_ops_share_numbers(const Numbers* from_python) { numbers = *from_python; }
void attnbackend_ops_verdict(int64_t of_python, const char* what) {
  verdict = of_python;
  message = what;
}
}
