// Ops of backends whose call is one call of a library's op. Python says of a call what that is, and calls like it
// go to the library's op without Python, as long as the plans are in force that Python found it with.
#include <memory>

#include "known_calls.h"

// Where an argument of the library's op comes from. As in ops/library_calls.py.
struct Part {
  enum Kind : int64_t { ABSENT, CONSTANT, HELD, ARGUMENT, HALF };
  int64_t kind;
  int64_t is_optional;   // by the schema
  StableIValue value;    // of CONSTANT; a HELD tensor's handle; which of our arguments
  int64_t half;          // of a HALF: 0 keys, 1 values of a cache [blocks, 2, ...]
};

// A call of the library's op. It owns its tensors.
struct Lesson {
  std::string op, overload, results;  // results: T a tensor, L a list of tensors
  std::vector<Part> parts;

  Lesson() = default;
  Lesson(const Lesson&) = delete;
  Lesson& operator=(const Lesson&) = delete;
  ~Lesson() {
    for (const Part& part : parts)
      if (part.kind == Part::HELD) aoti_torch_delete_tensor_object(Arguments::as<AtenTensorHandle>(part.value));
  }
};
static thread_local std::shared_ptr<const Lesson> taught;  // what Python says of the call that it was given last

constexpr int64_t MOST_DIMENSIONS = 8;

static AtenTensorHandle half_of(const TensorView& cache, int64_t half) {
  int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
  for (int64_t i = 0, to = 0; i < cache.rank; ++i) {
    if (i == 1) continue;
    sizes[to] = cache.sizes[i];
    strides[to++] = cache.strides[i];
  }
  AtenTensorHandle own = nullptr;
  aoti_torch__reinterpret_tensor(cache.handle, cache.rank - 1, sizes, strides, half * cache.strides[1], &own);
  return own;
}

// What goes on the stack of the library's op, which takes it over.
static StableIValue argument_of(const Part& part, const Arguments& call) {
  if (part.kind == Part::ABSENT) return 0;
  StableIValue value = part.value;
  if (part.kind != Part::CONSTANT) {
    AtenTensorHandle own = nullptr;
    if (part.kind == Part::HALF) {
      own = half_of(call.tensor(static_cast<int>(part.value)), part.half);
    } else if (part.kind == Part::ARGUMENT) {
      aoti_torch_new_tensor_handle(call.tensor(static_cast<int>(part.value)).handle, &own);
    } else {
      aoti_torch_new_tensor_handle(Arguments::as<AtenTensorHandle>(part.value), &own);
    }
    value = torch::stable::detail::from(own);
  }
  return part.is_optional ? torch::stable::detail::from(new StableIValue(value)) : value;
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

// Where the library fails, Python repeats the call: it has the words for what is wrong.
static bool call_library(const Lesson& lesson, const Arguments& call) {
  StableIValue stack[64];
  for (size_t i = 0; i < lesson.parts.size(); ++i) stack[i] = argument_of(lesson.parts[i], call);
  if (torch_call_dispatcher(lesson.op.c_str(), lesson.overload.c_str(), stack, TORCH_ABI_VERSION)) return false;
  for (size_t i = 0; i < lesson.results.size(); ++i) drop(stack[i], lesson.results[i]);
  return true;
}

struct ByLibrary {
  typedef std::shared_ptr<const ::Lesson> Lesson;
  // Choices that are in the environment, where they may change at any time.
  static void sign_more(Signature& words) {
    for (const char* name : {"ATTNBACKEND_FLASH_ATTN", "ATTNBACKEND_FLASH_ATTN_FP8"}) {
      const char* value = std::getenv(name);
      add_text(words, value ? value : "");
    }
  }
  static bool serve(const Lesson& lesson, const Arguments& call) { return call_library(*lesson, call); }
  static Lesson take_lesson() { return std::move(taught); }
};

// ---- our ops --------------------------------------------------------------------------------------

static const char FORWARD[] = "WwwWWPPPfwbjjfwwwwwwwwssn";

constexpr int MOST_OPS = 8;
static std::string general_ops[MOST_OPS];  // Python's
static int num_served = 0;

static void serve(int which, StableIValue* stack) {
  static thread_local KnownCalls<ByLibrary> known[MOST_OPS];
  const Arguments call(stack, FORWARD);
  run(general_ops[which].c_str(), call, known[which]);
}

typedef void (*Kernel)(StableIValue*, uint64_t, uint64_t);
template <int which>
static void forward(StableIValue* stack, uint64_t, uint64_t) {
  serve(which, stack);
}
static const Kernel KERNELS[MOST_OPS] = {&forward<0>, &forward<1>, &forward<2>, &forward<3>,
                                         &forward<4>, &forward<5>, &forward<6>, &forward<7>};

static void hold(StableIValue* stack, uint64_t, uint64_t) {}  // the handle is the result: the caller's own

STABLE_TORCH_LIBRARY_IMPL(attnbackend_python, CompositeExplicitAutograd, library) {
  library.impl("hold", &hold);
}

extern "C" {
const char* attnbackend_ops_kinds() { return FORWARD; }

// Lets calls of `attnbackend::name` with tensors of a device come here. Whether there was room.
int64_t attnbackend_ops_serve(const char* name, const char* device) {
  static std::vector<TorchLibraryHandle> libraries;  // as long as the process
  if (num_served == MOST_OPS) return 0;
  general_ops[num_served] = std::string("attnbackend_python::") + name;
  TorchLibraryHandle library = nullptr;
  aoti_torch_library_init_impl("attnbackend", device, __FILE__, __LINE__, &library);
  torch_library_impl(library, name, KERNELS[num_served], TORCH_ABI_VERSION);
  libraries.push_back(library);
  ++num_served;
  return 1;
}

void attnbackend_ops_teach(const char* op, const char* overload, const char* results, const Part* parts,
                           int64_t count) {
  const auto lesson = std::make_shared<Lesson>();
  lesson->op = op;
  lesson->overload = overload;
  lesson->results = results;
  lesson->parts.assign(parts, parts + count);
  taught = lesson;
}
}
