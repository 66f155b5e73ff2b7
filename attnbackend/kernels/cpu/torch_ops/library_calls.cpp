// Ops of backends whose call is one call of a library's function. Python says of a call what that is, and calls like
// it go to the library without Python, as long as the plans are in force that Python found it with.
#include "ffi_call.h"
#include "op_call.h"

static thread_local std::shared_ptr<const Lesson> taught;  // what Python says of the call that it was given last

struct ByLibrary {
  typedef std::shared_ptr<const ::Lesson> Lesson;
  // Choices that are in the environment, where they may change at any time.
  static void sign_more(Signature& words) {
    for (const char* name : {"ATTNBACKEND_FLASH_ATTN", "ATTNBACKEND_FLASH_ATTN_FP8"}) {
      const char* value = std::getenv(name);
      add_text(words, value ? value : "", value ? std::strlen(value) : 0);
    }
  }
  // What failed once is Python's until the plan goes.
  static bool serve(Lesson& lesson, const Arguments& call) {
    if (lesson && lesson->make(call)) return call.release(), true;
    lesson.reset();
    return false;
  }
  static Lesson take_lesson() { return std::move(taught); }
};

// ---- our ops --------------------------------------------------------------------------------------

static const char FORWARD[] = "WwwWWPPPfwbjjfwwwwwwwwssn";

constexpr int MOST_OPS = 8;
static std::string general_ops[MOST_OPS];  // Python's
static int num_served = 0;
static thread_local KnownCalls<ByLibrary> known_calls[MOST_OPS];

template <int which>
static void forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Arguments call(*stack, FORWARD);
  run(general_ops[which].c_str(), call, known_calls[which]);
}

template <int... I>
static torch::CppFunction kernel_of(int which, std::integer_sequence<int, I...>) {
  typedef torch::CppFunction (*Make)();
  static const Make make[] = {&torch::CppFunction::makeFromBoxedFunction<&forward<I>>...};
  return make[which]();
}

// The address of a tensor of the caller's own.
static int64_t hold(const at::Tensor& x) { return reinterpret_cast<int64_t>(new at::Tensor(x)); }

TORCH_LIBRARY_IMPL(attnbackend_python, CompositeExplicitAutograd, library) { library.impl("hold", &hold); }

extern "C" {
const char* attnbackend_ops_kinds() { return FORWARD; }

// Lets calls of `attnbackend::name` with tensors of a device come here. Whether there was room.
int64_t attnbackend_ops_serve(const char* name, const char* device) {
  static std::vector<torch::Library> libraries;  // as long as the process
  if (num_served == MOST_OPS) return 0;
  general_ops[num_served] = std::string("attnbackend_python::") + name;
  libraries.emplace_back(torch::Library::IMPL, "attnbackend", c10::parseDispatchKey(device), __FILE__, __LINE__);
  libraries.back().impl(name, kernel_of(num_served, std::make_integer_sequence<int, MOST_OPS>()));
  ++num_served;
  return 1;
}

void attnbackend_ops_teach_op(const char* op, const char* overload, const Part* parts, int64_t count) {
  taught = std::make_shared<OpCall>(op, overload, parts, count);
}

// What this thread knows, as long as the libraries that it belongs to are all there.
void attnbackend_ops_forget() {
  taught.reset();
  for (KnownCalls<ByLibrary>& known : known_calls) known.lessons.clear();
}

void attnbackend_ops_share_ffi(const Ffi* from_python) { ffi = *from_python; }

void attnbackend_ops_teach_ffi(void* function, const Part* parts, int64_t count) {
  taught = std::make_shared<FfiCall>(function, parts, count);
}
}
