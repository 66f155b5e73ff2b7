// Entry points. Nothing here depends on Python or torch headers.
#include "attention.h"
#include "matmul.h"
#include "rope.h"

static int64_t tiles_of(const Item& item) { return (item.key1 - item.key0 + KT - 1) / KT; }

// What a key tile costs an item, in units of one narrow tile.
static int64_t tile_cost(const Item& item) {
  const int64_t rows = item.row1 - item.row0;
  return rows <= NARROW_ROWS ? 1 : 4 * ((rows + VW - 1) / VW);
}

// Items of one head follow each other, so that its keys and values stay in the cache; the longest first.
static std::vector<Item> whole_items(const AttentionArgs& a) {
  std::vector<Item> items;
  items.reserve(a.requests * a.kv_heads);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t rows = query_length(a, r) * group_size(a);
    const int64_t tiles = (rows + WIDE_ROWS - 1) / WIDE_ROWS;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      for (int64_t t = tiles - 1; t >= 0; --t) {
        Item item = {static_cast<int32_t>(r), static_cast<int32_t>(h), t * WIDE_ROWS,
                     std::min<int64_t>(rows, (t + 1) * WIDE_ROWS), 0, 0, -1, 0};
        key_range(a, r, item.row0, item.row1, &item.key0, &item.key1);
        items.push_back(item);
      }
    }
  }
  return items;
}

// Below this cost waking the other threads takes longer than the work.
constexpr int64_t SERIAL_COST = 6;

struct Plan {
  std::vector<Item> items;
  std::unique_ptr<Merge[]> merges;
  std::vector<float> floats;
  int64_t cost = 0;
};

// Splits an item over keys when it is more than an eighth of a thread's share of the work.
static Plan make_plan(const AttentionArgs& a) {
  Plan plan;
  std::vector<Item> whole = whole_items(a);
  for (const Item& item : whole) plan.cost += tiles_of(item) * tile_cost(item);
  if (a.threads == 1) {
    plan.items = std::move(whole);
    return plan;
  }
  const int64_t share = std::max<int64_t>(1, plan.cost / (8 * a.threads));
  int64_t merges = 0, floats = 0;
  std::vector<std::pair<int64_t, int64_t>> sizes;  // parts, first float
  for (Item item : whole) {
    const int64_t tiles = tiles_of(item), step = std::max<int64_t>(2, share / tile_cost(item));
    const int64_t parts = std::max<int64_t>(1, (tiles + step - 1) / step);
    if (parts == 1) {
      plan.items.push_back(item);
      continue;
    }
    const int32_t end = item.key1;
    const int64_t even = (tiles + parts - 1) / parts * KT;
    item.merge = merges++;
    for (item.part = 0; item.key0 < end; ++item.part, item.key0 = item.key1) {
      item.key1 = static_cast<int32_t>(std::min<int64_t>(end, item.key0 + even));
      plan.items.push_back(item);
      if (item.key1 == end) { ++item.part; break; }
    }
    sizes.emplace_back(item.part, floats);
    floats += item.part * (item.row1 - item.row0) * part_stride(a);
  }
  plan.floats.resize(floats);
  plan.merges.reset(new Merge[merges]);
  for (int64_t i = 0; i < merges; ++i) {
    plan.merges[i].parts = sizes[i].first;
    plan.merges[i].first_float = sizes[i].second;
    plan.merges[i].left.store(sizes[i].first);
  }
  return plan;
}

// A thread's share of the items: neighbours, so that it finds in its cache what it read in the call before.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

// Runs what is left of a share.
template <class C>
static void run_share(const AttentionArgs& a, Plan& plan, Share& share, Scratch& scratch) {
  for (int64_t i = share.next.fetch_add(1); i < share.end; i = share.next.fetch_add(1)) {
    const Item& following = plan.items[std::min(i + 1, share.end - 1)];
    run_item<C>(a, plan.items[i], following, scratch, plan.merges.get(), plan.floats.data());
  }
}

template <class C>
static void run_plan(const AttentionArgs& a, Plan& plan) {
  const int64_t count = static_cast<int64_t>(plan.items.size());
  const int64_t threads = std::min<int64_t>(plan.cost < SERIAL_COST ? 1 : a.threads, count);
  const std::unique_ptr<Share[]> shares(new Share[threads]);
  for (int64_t t = 0; t < threads; ++t) {
    shares[t].next.store(t * count / threads);
    shares[t].end = (t + 1) * count / threads;
  }
  const auto run = [&](int64_t thread) {  // its own share, then what others have left
    Scratch& scratch = scratch_for(a);
    for (int64_t t = 0; t < threads; ++t) run_share<C>(a, plan, shares[(thread + t) % threads], scratch);
  };
  if (threads == 1) return run(0);
#pragma omp parallel num_threads(threads)
  run(omp_get_thread_num());
}

static void run_bfloat16(const AttentionArgs& a, Plan& plan) {
#if defined(__AVX512BF16__)
  const int64_t step = Products<BF16Pairs>::STEP;
  const bool whole = a.head_size % step == 0 && a.value_size % step == 0;
  if (whole && a.query_dtype == BFLOAT16) return run_plan<BF16Pairs>(a, plan);
#endif
  run_plan<BF16>(a, plan);
}

static Refusal attention(const AttentionArgs& a) {
  const Refusal refusal = check(a);
  if (refusal.code) return refusal;
  for (int64_t t = a.requests ? a.query_start_loc[a.requests] : 0; t < a.tokens; ++t)
    write_empty_token(a, t);
  Plan plan = make_plan(a);
  if (plan.items.empty()) return refusal;
  switch (a.cache_dtype) {
    case FLOAT32: run_plan<F32>(a, plan); break;
    case FLOAT16: run_plan<F16>(a, plan); break;
    case BFLOAT16: run_bfloat16(a, plan); break;
    case E4M3FN: run_plan<E4M3>(a, plan); break;
    default: run_plan<E5M2F>(a, plan); break;
  }
  return refusal;
}

static thread_local Refusal last_refusal;

extern "C" {
int64_t attnbackend_attention(const AttentionArgs* args) {
  last_refusal = attention(*args);
  return last_refusal.code;
}
int64_t attnbackend_cache_write(const WriteArgs* args) {
  last_refusal = cache_write(*args);
  return last_refusal.code;
}
int64_t attnbackend_rope(const RopeArgs* args) {
  last_refusal = rope(*args);
  return last_refusal.code;
}
void attnbackend_linear(const LinearArgs* args) { linear(*args); }
void attnbackend_last_refusal(Refusal* refusal) { *refusal = last_refusal; }
int64_t attnbackend_struct_sizes(void) {
  return (static_cast<int64_t>(sizeof(AttentionArgs)) * 65536 + sizeof(WriteArgs)) * 65536 + sizeof(RopeArgs);
}
}
