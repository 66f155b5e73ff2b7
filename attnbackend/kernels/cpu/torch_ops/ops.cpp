// The ops of the CPU's backends, for torch to call without Python. Python defines their schemas; it compares
// them with `attnbackend_ops_kinds` before it lets any call be served here.
#include "linear_op.h"

// By a kernel of ours, which needs no lesson.
template <bool (*serve_call)(const Arguments&)>
struct ByKernel {
  struct Lesson {};
  static void sign_more(Signature&) {}
  static bool serve(Lesson, const Arguments& call) { return serve_call(call) && (call.release(), true); }
  static Lesson take_lesson() { return {}; }
};

static bool has_rows(const TensorView& x, int64_t tokens) { return !x || x.sizes[0] == tokens; }

// 0: one scale for all heads, 1: one each.
static int64_t scale_step(const TensorView& scale) {
  for (int64_t i = 0; i < scale.rank; ++i)
    if (scale.sizes[i] > 1) return 1;
  return 0;
}

static char* element(const TensorView& x, int64_t index) {
  return static_cast<char*>(x.data()) + index * element_size(dtype_code(x));
}

// ---- attention ----------------------------------------------------------------------------------

static void set_batch(AttentionArgs& a, const TensorView& starts, const TensorView& lens,
                      const TensorView& table) {
  a.query_start_loc = static_cast<const int32_t*>(starts.data());
  a.seq_lens = static_cast<const int32_t*>(lens.data());
  a.block_table = static_cast<const int32_t*>(table.data());
  a.requests = lens.sizes[0];
  a.table_width = table.sizes[1];
  a.table_row = table.strides[0];
}

static void set_results(AttentionArgs& a, const TensorView& output, const TensorView& lse) {
  a.output = output.data();
  a.output_dtype = dtype_code(output);
  a.tokens = output.sizes[0];
  a.heads = output.sizes[1];
  a.value_size = output.sizes[2];
  a.output_token = output.strides[0];
  a.output_head = output.strides[1];
  if (!lse) return;
  a.lse = static_cast<float*>(lse.data());
  a.lse_token = lse.strides[0];
  a.lse_head = lse.strides[1];
}

static void set_scales(AttentionArgs& a, const TensorView& k_scale, const TensorView& v_scale) {
  a.k_scale = static_cast<const float*>(k_scale.data());
  a.k_scale_step = scale_step(k_scale);
  a.v_scale = static_cast<const float*>(v_scale.data());
  a.v_scale_step = scale_step(v_scale);
}

static void set_query(AttentionArgs& a, const TensorView& query) {
  a.query = query.data();
  a.query_dtype = dtype_code(query);
  a.head_size = query.sizes[2];
  a.query_token = query.strides[0];
  a.query_head = query.strides[1];
}

// Keys and values [blocks, 2, block_size, kv_heads, head_size].
template <class Args>
static void set_pages(Args& a, const TensorView& cache) {
  a.cache_dtype = dtype_code(cache);
  a.blocks = cache.sizes[0];
  a.block_size = cache.sizes[2];
  a.kv_heads = cache.sizes[3];
  a.key_cache = element(cache, 0);
  a.value_cache = element(cache, cache.strides[1]);
  a.k_block = a.v_block = cache.strides[0];
  a.k_slot = a.v_slot = cache.strides[2];
  a.k_head = a.v_head = cache.strides[3];
}

// Latents [blocks, block_size, row], whose values start at element `values` of a row.
template <class Args>
static void set_latent_pages(Args& a, const TensorView& cache, int64_t values) {
  a.cache_dtype = dtype_code(cache);
  a.blocks = cache.sizes[0];
  a.block_size = cache.sizes[1];
  a.kv_heads = 1;
  a.key_cache = element(cache, 0);
  a.value_cache = element(cache, values);
  a.k_block = a.v_block = cache.strides[0];
  a.k_slot = a.v_slot = cache.strides[1];
}

static const char FORWARD[] = "TttWTWWWftbjjfwwwwwwwtssi";

static bool serve_forward(const Arguments& call) {
  const TensorView query = call.tensor(0), cache = call.tensor(3), output = call.tensor(4);
  const TensorView lse = call.tensor(9), sinks = call.tensor(15);
  const bool does_more = call.tensor(16) || call.tensor(17) || call.tensor(20) || call.tensor(21);
  if (does_more || call.text(23) != "decoder") return false;
  const int64_t tokens = query.sizes[0];
  if (!tokens || !has_rows(output, tokens) || !has_rows(lse, tokens)) return false;
  if (!has_rows(call.tensor(1), tokens) || !has_rows(call.tensor(2), tokens)) return false;
  if (dtype_code(cache) < 0 || (sinks && dtype_code(sinks) != FLOAT32)) return false;
  AttentionArgs a = {};
  set_query(a, query);
  set_pages(a, cache);
  set_results(a, output, lse);
  set_batch(a, call.tensor(5), call.tensor(6), call.tensor(7));
  set_scales(a, call.tensor(18), call.tensor(19));
  a.alibi_slopes = static_cast<const float*>(call.tensor(14).data());
  a.sinks = static_cast<const float*>(sinks.data());
  a.paged = 1;
  a.causal = call.truth(10);
  a.window = call.integer(11);
  a.chunk = call.integer(12);
  a.scale = call.number(8);
  a.soft_cap = call.number(13);
  a.threads = at::get_num_threads();
  return kernels.attention(&a) == 0;
}

static void forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static thread_local KnownCalls<ByKernel<serve_forward>> known;
  const Arguments call(*stack, FORWARD);
  run("attnbackend_python::cpu_attn_forward", call, known);
}

// Both parts of the queries side by side: where they are, or in a buffer that lives as long as the thread.
static void set_joined_query(AttentionArgs& a, const TensorView& latent, const TensorView& rope) {
  static thread_local std::vector<char> buffer;
  const int64_t size = element_size(dtype_code(latent)), rank = latent.sizes[2], tail = rope.sizes[2];
  set_query(a, latent);
  a.head_size = rank + tail;
  const bool same = latent.strides[0] == rope.strides[0] && latent.strides[1] == rope.strides[1];
  if (same && rope.data() == element(latent, rank)) return;
  const int64_t heads = latent.sizes[1];
  buffer.resize(latent.sizes[0] * heads * a.head_size * size);
  char* to = buffer.data();
  for (int64_t t = 0; t < latent.sizes[0]; ++t)
    for (int64_t h = 0; h < heads; ++h, to += a.head_size * size) {
      std::memcpy(to, element(latent, t * latent.strides[0] + h * latent.strides[1]), rank * size);
      std::memcpy(to + rank * size, element(rope, t * rope.strides[0] + h * rope.strides[1]), tail * size);
    }
  a.query = buffer.data();
  a.query_token = heads * a.head_size;
  a.query_head = a.head_size;
}

static const char FORWARD_MQA[] = "TTWTWWWfttwsi";

static bool serve_forward_mqa(const Arguments& call) {
  const TensorView latent = call.tensor(0), rope = call.tensor(1), cache = call.tensor(2);
  const TensorView output = call.tensor(3), lse = call.tensor(8), scale = call.tensor(10);
  const int64_t tokens = latent.sizes[0];
  if (!tokens || !has_rows(rope, tokens) || !has_rows(output, tokens) || !has_rows(lse, tokens)) return false;
  if (call.tensor(9) || dtype_code(cache) < 0) return false;
  AttentionArgs a = {};
  set_joined_query(a, latent, rope);
  set_latent_pages(a, cache, 0);
  set_results(a, output, lse);
  set_batch(a, call.tensor(4), call.tensor(5), call.tensor(6));
  set_scales(a, scale, scale);
  a.paged = a.causal = 1;
  a.scale = call.number(7);
  a.threads = at::get_num_threads();
  return kernels.attention(&a) == 0;
}

static void forward_mqa(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static thread_local KnownCalls<ByKernel<serve_forward_mqa>> known;
  const Arguments call(*stack, FORWARD_MQA);
  run("attnbackend_python::cpu_mla_forward_mqa", call, known);
}

// ---- cache writes -------------------------------------------------------------------------------

static const char UPDATE[] = "TTWTwwsi";

static void set_scales(WriteArgs& w, const TensorView& k_scale, const TensorView& v_scale) {
  w.k_scale = static_cast<const float*>(k_scale.data());
  w.k_scale_step = scale_step(k_scale);
  w.v_scale = static_cast<const float*>(v_scale.data());
  w.v_scale_step = scale_step(v_scale);
}

// All but the keys' address and strides.
static void set_write(WriteArgs& w, const TensorView& key, const TensorView& value, const TensorView& cache,
                      const TensorView& slots) {
  set_pages(w, cache);
  w.value = value.data();
  w.source_dtype = dtype_code(key);
  w.slots = static_cast<const int64_t*>(slots.data());
  w.tokens = key.sizes[0];
  w.head_size = w.value_size = key.sizes[2];
  w.value_token = value.strides[0];
  w.value_head = value.strides[1];
  w.threads = at::get_num_threads();
}

static bool serve_update(const Arguments& call) {
  const TensorView key = call.tensor(0), value = call.tensor(1), cache = call.tensor(2);
  const TensorView slots = call.tensor(3);
  const int64_t tokens = key.sizes[0];
  if (!tokens || !has_rows(value, tokens) || !has_rows(slots, tokens) || dtype_code(cache) < 0) return false;
  WriteArgs w = {};
  set_write(w, key, value, cache, slots);
  set_scales(w, call.tensor(4), call.tensor(5));
  w.key = key.data();
  w.key_token = key.strides[0];
  w.key_head = key.strides[1];
  return kernels.cache_write(&w) == 0;
}

static void update(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static thread_local KnownCalls<ByKernel<serve_update>> known;
  const Arguments call(*stack, UPDATE);
  run("attnbackend_python::cpu_attn_kv_cache_update", call, known);
}

// ---- rotations and cache writes -----------------------------------------------------------------

static int64_t (*rope_kernel)(const RopeArgs*) = nullptr;  // set once by Python

static at::Tensor set_heads(TurnedHeads& x, const TensorView& source, const TensorView& weight, double eps) {
  const at::Tensor output = at::detail::empty_cpu({source.sizes, 3}, source.dtype);
  x.source = source.data();
  x.weight = weight.data();
  x.output = output.data_ptr();
  x.heads = source.sizes[1];
  x.token = source.strides[0];
  x.head = source.strides[1];
  x.weight_dtype = dtype_code(weight);
  x.eps = eps;
  return output;
}

static void set_angles(RopeArgs& a, const TensorView& cos, const TensorView& sin) {
  a.cos = cos.data();
  a.sin = sin.data();
  a.rotated = cos.sizes[1];
  a.cos_token = cos.strides[0];
  a.sin_token = sin.strides[0];
  a.angle_dtype = dtype_code(cos);
}

static const char ROPE_UPDATE[] = "TTTTTWTwwffwwsi";

struct ByRopeKernel : ByKernel<nullptr> {
  static bool serve(Lesson, const Arguments& call) {
    const TensorView key = call.tensor(1), value = call.tensor(2), cache = call.tensor(5), slots = call.tensor(6);
    const int64_t tokens = key.sizes[0];
    for (int i : {0, 2, 3, 4, 6})
      if (!has_rows(call.tensor(i), tokens)) return false;
    if (!tokens || dtype_code(cache) < 0) return false;
    RopeArgs a = {};
    set_write(a.write, key, value, cache, slots);
    set_scales(a.write, call.tensor(11), call.tensor(12));
    set_angles(a, call.tensor(3), call.tensor(4));
    const at::Tensor query = set_heads(a.query, call.tensor(0), call.tensor(7), call.number(9));
    const at::Tensor turned = set_heads(a.key, key, call.tensor(8), call.number(10));
    a.write.key = turned.data_ptr();
    a.write.key_token = key.sizes[1] * key.sizes[2];
    a.write.key_head = key.sizes[2];
    if (rope_kernel(&a)) return false;
    call.release(query, turned);
    return true;
  }
};

static void rope_update(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static thread_local KnownCalls<ByRopeKernel> known;
  const Arguments call(*stack, ROPE_UPDATE);
  run("attnbackend_python::rope_kv_cache_update", call, known);
}

// ---- cache writes of latents --------------------------------------------------------------------

static const char MLA_UPDATE[] = "TTWTwsi";

static bool serve_mla_update(const Arguments& call) {
  const TensorView latent = call.tensor(0), rope = call.tensor(1), cache = call.tensor(2);
  const TensorView slots = call.tensor(3), scale = call.tensor(4);
  const int64_t tokens = latent.sizes[0];
  if (!tokens || !has_rows(rope, tokens) || !has_rows(slots, tokens) || dtype_code(cache) < 0) return false;
  WriteArgs w = {};
  set_latent_pages(w, cache, latent.sizes[1]);
  w.key = latent.data();
  w.value = rope.data();
  w.source_dtype = dtype_code(latent);
  w.slots = static_cast<const int64_t*>(slots.data());
  w.tokens = tokens;
  w.head_size = latent.sizes[1];
  w.value_size = rope.sizes[1];
  w.key_token = latent.strides[0];
  w.value_token = rope.strides[0];
  w.k_scale = w.v_scale = static_cast<const float*>(scale.data());
  w.threads = at::get_num_threads();
  return kernels.cache_write(&w) == 0;
}

static void mla_update(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static thread_local KnownCalls<ByKernel<serve_mla_update>> known;
  const Arguments call(*stack, MLA_UPDATE);
  run("attnbackend_python::cpu_mla_mla_kv_cache_update", call, known);
}

extern "C" {
// Lets calls come here. Python's side is there by then: other threads may be calling.
void attnbackend_ops_serve() {
  static torch::Library library(torch::Library::IMPL, "attnbackend", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("cpu_attn_forward", torch::CppFunction::makeFromBoxedFunction<&forward>());
  library.impl("cpu_attn_kv_cache_update", torch::CppFunction::makeFromBoxedFunction<&update>());
  library.impl("cpu_mla_forward_mqa", torch::CppFunction::makeFromBoxedFunction<&forward_mqa>());
  library.impl("cpu_mla_mla_kv_cache_update", torch::CppFunction::makeFromBoxedFunction<&mla_update>());
  library.impl("rope_kv_cache_update", torch::CppFunction::makeFromBoxedFunction<&rope_update>());
  library.impl("cpu_linear", torch::CppFunction::makeFromBoxedFunction<&linear>());
  library.impl("cpu_linears", torch::CppFunction::makeFromBoxedFunction<&linears>());
  library.impl("cpu_gated_linear", torch::CppFunction::makeFromBoxedFunction<&gated_linear>());
}

const char* attnbackend_ops_kinds() {
  static const std::string kinds =
      std::string(FORWARD) + " " + UPDATE + " " + FORWARD_MQA + " " + MLA_UPDATE + " " + ROPE_UPDATE + " " + LINEAR +
      " " + LINEARS + " " + GATED_LINEAR;
  return kinds.c_str();
}
void attnbackend_ops_share(const Kernels* from_python) { kernels = *from_python; }
void attnbackend_ops_share_rope(int64_t (*kernel)(const RopeArgs*)) { rope_kernel = kernel; }
void attnbackend_ops_serve_linear(int64_t serves) { serves_linear = serves; }
}
