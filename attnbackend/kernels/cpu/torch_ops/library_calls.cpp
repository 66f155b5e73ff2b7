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
      add_text(words, value ? value : "");
    }
  }
  // What failed once is Python's until the plan goes.
  static bool serve(Lesson& lesson, const Arguments& call) {
    if (lesson && lesson->make(call)) return true;
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

static void serve(int which, StableIValue* stack) {
  const Arguments call(stack, FORWARD);
  run(general_ops[which].c_str(), call, known_calls[which]);
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

void attnbackend_ops_teach_op(const char* op, const char* overload, const char* results, const Part* parts,
                              int64_t count) {
  taught = std::make_shared<OpCall>(op, overload, results, parts, count);
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
