"""Where a cache lies and what is written there.

Shape legend: B blocks, S block_size, K key-value heads, D head size, T tokens.
"""

from __future__ import annotations

import pytest
import torch
from toy_backends import make_backend

from attnbackend import (
    AttentionParams,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowSpec,
    allocate_kv_cache,
    allocate_kv_caches,
    kv_cache_geometry,
    resolve_kv_sharing,
)
from attnbackend.kv_cache import (
    expand_block_table,
    quantize_to_cache,
    resolve_kv_cache_dtype,
    spec_of,
    write_kv_cache,
)
from attnbackend.platforms import most_memory

NHD, HND = KVCacheLayout.NHD, KVCacheLayout.HND
TOY = make_backend(supported_block_sizes=(MultipleOf(1),))


def spec(cls=FullAttentionSpec, **changes):
    plain = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.float32}
    return cls(**{**plain, **changes})


def offset(geometry, *index):
    return sum(i * s for i, s in zip(index, geometry.stride, strict=True))


# Geometry


@pytest.mark.parametrize(
    ("layout", "stride"),
    [(NHD, (16384, 8192, 512, 64, 1)), (HND, (16384, 8192, 64, 1024, 1))],
)
def test_layouts_share_a_shape_and_differ_in_strides(layout, stride):
    g = kv_cache_geometry(TOY, spec(layout=layout), 10)
    assert g.shape == (10, 2, 16, 8, 64)
    assert g.stride == stride
    assert g.page_size_bytes == 2 * 16 * 8 * 64 * 4
    assert g.num_elements == 10 * 2 * 16 * 8 * 64
    assert g.max_offset == g.num_elements - 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "itemsize"),
    [("auto", torch.bfloat16, 2), ("float32", torch.float32, 4), ("fp8", torch.float8_e4m3fn, 1)],
)
def test_page_bytes_follow_the_cache_dtype(kv_cache_dtype, dtype, itemsize):
    s = spec(dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    g = kv_cache_geometry(TOY, s, 3)
    assert g.dtype == dtype
    assert g.page_size_bytes == 2 * 16 * 8 * 64 * itemsize


@pytest.mark.parametrize("layout", [NHD, HND])
def test_every_element_has_its_own_offset(layout):
    small = spec(layout=layout, block_size=3, num_kv_heads=2, head_size=5)
    g = kv_cache_geometry(TOY, small, 4)
    offsets = torch.arange(g.num_elements).as_strided(g.shape, g.stride).flatten()
    assert offsets.sort().values.tolist() == list(range(4 * 2 * 3 * 2 * 5))


def test_offset_of_block_65536_exceeds_32_bits():
    g = kv_cache_geometry(TOY, spec(head_size=128), 65537)
    assert g.stride[0] == 2 * 16 * 8 * 128
    assert offset(g, 65536, 0, 0, 0, 0) == 2147483648
    assert g.max_offset == 2147483648 + 2 * 16 * 8 * 128 - 1


def test_the_stride_decides_the_largest_offset_in_a_shared_buffer():
    g = kv_cache_geometry(TOY, spec(head_size=128), 2067, block_stride=1_039_680)
    assert g.stride[0] == 1_039_680
    assert offset(g, 2066, 0, 0, 0, 0) == 2066 * 1_039_680 == 2_147_978_880
    assert g.max_offset == 2_147_978_880 + 32768 - 1
    assert g.max_offset > 2**31 - 1 > torch.Size(g.shape).numel()
    assert g.page_size_bytes == 32768 * 4


def test_the_figures_agree_with_torch_on_a_strided_view():
    g = kv_cache_geometry(TOY, spec(head_size=128), 2067, block_stride=1_039_680)
    view = torch.empty(g.num_elements, device="meta").as_strided(g.shape, g.stride)
    assert view[2066, 1, 15, 7, 127].storage_offset() == g.max_offset


INT32 = make_backend(max_cache_offset=2**31 - 1)


@pytest.mark.parametrize(("stride", "most"), [(None, 65536), (1_039_680, 2066)])
def test_a_backend_of_32_bit_offsets_states_its_limit(stride, most):
    big = spec(head_size=128)
    assert kv_cache_geometry(INT32, big, most, block_stride=stride).max_offset <= 2**31 - 1
    with pytest.raises(ValueError, match=rf"num_blocks={most + 1} .*at most {most} blocks"):
        kv_cache_geometry(INT32, big, most + 1, block_stride=stride)


def test_the_limit_of_offsets_is_the_last_that_is_allowed():
    needed = kv_cache_geometry(TOY, spec(), 4).max_offset
    kv_cache_geometry(make_backend(max_cache_offset=needed), spec(), 4)
    with pytest.raises(ValueError, match=rf"reaches offset {needed}, .*at most 3 blocks"):
        kv_cache_geometry(make_backend(max_cache_offset=needed - 1), spec(), 4)


@pytest.mark.parametrize(
    ("backend", "changes", "num_blocks", "match"),
    [
        (TOY, {}, 0, "num_blocks=0 must be at least 1"),
        (make_backend(), {"block_size": 24}, 4, "block_size=24 .*TOY; allowed: multiples of 16"),
        (make_backend(supported_layouts=(NHD,)), {"layout": HND}, 4, "layout=HND .*allowed: NHD"),
    ],
)
def test_a_cache_that_the_backend_cannot_hold_is_refused(backend, changes, num_blocks, match):
    with pytest.raises(ValueError, match=match):
        kv_cache_geometry(backend, spec(**changes), num_blocks)


def test_a_stride_order_that_is_no_permutation_is_refused():
    wrong = make_backend(get_kv_cache_stride_order=classmethod(lambda cls, layout: (0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r"stride order \(0, 1, 2, 3\)"):
        kv_cache_geometry(wrong, spec(), 4)


# Allocation


@pytest.mark.parametrize("layout", [NHD, HND])
def test_an_allocated_cache_has_the_geometry(layout):
    s = spec(layout=layout, kv_cache_dtype="fp8")
    cache, g = allocate_kv_cache(TOY, s, 6, "cpu"), kv_cache_geometry(TOY, s, 6)
    assert (tuple(cache.shape), cache.stride(), cache.dtype) == (g.shape, g.stride, g.dtype)
    assert cache.untyped_storage().nbytes() == 6 * g.page_size_bytes


def test_layers_of_one_buffer_lie_side_by_side_and_do_not_overlap():
    specs = {"a": spec(layout=NHD), "b": spec(layout=HND), "c": spec(num_kv_heads=2, head_size=32)}
    caches = allocate_kv_caches(dict.fromkeys(specs, TOY), specs, 5, "cpu")
    pages = {name: kv_cache_geometry(TOY, s, 1).page_size_bytes // 4 for name, s in specs.items()}
    for i, cache in enumerate(caches.values()):
        cache.fill_(i)
    for i, cache in enumerate(caches.values()):
        assert (cache == i).all()
    offsets = [cache.storage_offset() for cache in caches.values()]
    assert offsets == [0, pages["a"], pages["a"] + pages["b"]]
    assert all(cache.stride(0) == sum(pages.values()) for cache in caches.values())
    assert len({cache.untyped_storage().data_ptr() for cache in caches.values()}) == 1


KV_FIRST = make_backend(
    get_kv_cache_shape=staticmethod(lambda b, s, k, d, dtype="auto": (2, b, s, k, d)),
)


def test_a_cache_whose_blocks_are_not_slowest_has_its_own_geometry():
    g = kv_cache_geometry(KV_FIRST, spec(), 4)
    assert g.shape == (2, 4, 16, 8, 64)
    assert g.page_size_bytes == 2 * 16 * 8 * 64 * 4


def test_a_cache_whose_blocks_are_not_slowest_cannot_share_a_buffer():
    specs = {"a": spec(), "b": spec()}
    with pytest.raises(ValueError, match="TOY cannot share a buffer"):
        allocate_kv_caches(dict.fromkeys(specs, KV_FIRST), specs, 5, "cpu")


def test_blocks_that_would_overlap_are_refused():
    with pytest.raises(ValueError, match=r"block_stride=16383 .*at least 16384"):
        kv_cache_geometry(TOY, spec(), 4, block_stride=16383)


@pytest.mark.parametrize(
    ("specs", "backends", "match"),
    [
        ({"a": spec(), "b": spec(dtype=torch.float16)}, "ab", "element type, got .*float16.*32"),
        ({"a": spec(), "b": spec(block_size=32)}, "ab", "one block_size, got 16, 32"),
        ({}, "", "got no layer"),
        ({"a": spec(), "b": spec()}, "a", "only one of the two for: b"),
    ],
)
def test_layers_that_cannot_share_a_buffer_are_refused(specs, backends, match):
    with pytest.raises(ValueError, match=match):
        allocate_kv_caches(dict.fromkeys(backends, TOY), specs, 5, "cpu")


@pytest.mark.parametrize("num_blocks", [10**9, 10**30])
@pytest.mark.parametrize(
    "allocate",
    [
        lambda num_blocks: allocate_kv_cache(TOY, spec(), num_blocks, "cpu"),
        lambda num_blocks: allocate_kv_caches({"a": TOY}, {"a": spec()}, num_blocks, "cpu"),
    ],
    ids=["a layer", "one buffer"],
)
def test_more_blocks_than_there_is_memory_are_refused_with_what_fits(allocate, num_blocks):
    """A system may promise them: a CPU's memory is looked at before."""
    page = kv_cache_geometry(TOY, spec(), 1).page_size_bytes
    fitting = most_memory(torch.device("cpu")) // page
    with pytest.raises(ValueError, match=rf"num_blocks={num_blocks} of {page} .*at most {fitting} blocks"):
        allocate(num_blocks)


def test_other_failures_of_an_allocation_keep_their_names():
    with pytest.raises(RuntimeError, match="nodevice"):
        allocate_kv_cache(TOY, spec(), 4, "nodevice")


# Specs


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: spec(block_size=0), "block_size=0 must be at least 1"),
        (lambda: spec(num_kv_heads=0), "num_kv_heads=0"),
        (lambda: spec(head_size=-64), "head_size=-64"),
        (lambda: spec(kv_cache_dtype="int4"), "kv_cache_dtype='int4' is unknown; allowed: auto"),
        (lambda: spec(layout="DHN"), "DHN"),
        (lambda: spec(SlidingWindowSpec, sliding_window=0), "sliding_window=0"),
        (lambda: spec(MLAAttentionSpec, num_kv_heads=2), "num_kv_heads=2 must be 1"),
        (lambda: MambaSpec(block_size=1, shapes=((2, 3),), dtypes=()), "1 shapes and 0 dtypes"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_specs_group_by_equality():
    assert spec() == spec(layout="NHD")
    assert hash(spec()) == hash(spec())
    assert spec() != spec(CrossAttentionSpec)
    assert spec() != spec(layout=HND)


@pytest.mark.parametrize(("window", "kind"), [(None, FullAttentionSpec), (9, SlidingWindowSpec)])
def test_the_spec_of_a_layer_follows_its_parameters(window, kind):
    params = AttentionParams(
        num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, kv_cache_dtype="fp8",
        block_size=32, device_type="cpu", scale=0.1, sliding_window=window,
    )  # fmt: skip
    found = spec_of(params, HND)
    assert type(found) is kind
    assert (found.block_size, found.num_kv_heads, found.head_size) == (32, 2, 64)
    assert (found.cache_dtype, found.layout) == (torch.float8_e4m3fn, HND)


def test_the_cache_dtype_of_auto_is_the_models():
    assert resolve_kv_cache_dtype("auto", torch.float16) is torch.float16
    assert resolve_kv_cache_dtype("fp8", torch.float16) is torch.float8_e4m3fn


# Writing


def new_rows(tokens, heads, head_size=64):
    return (torch.randn(tokens, heads, head_size) for _ in range(2))


def rows_at(cache_BSKD, slots, block_size):
    """Reference: one element after another, by the definition of a slot."""
    return torch.stack([cache_BSKD[s // block_size][s % block_size] for s in slots])


@pytest.mark.parametrize("heads", [8, 6])
@pytest.mark.parametrize("layout", [NHD, HND])
def test_slots_of_both_layouts_read_back_what_was_written(layout, heads):
    cache = allocate_kv_cache(TOY, spec(layout=layout, num_kv_heads=heads), 10, "cpu")
    cache.fill_(torch.nan)
    key, value = new_rows(3, heads)
    slots = [0, 17, 159]
    write_kv_cache(key, value, cache, torch.tensor(slots))
    assert torch.equal(rows_at(cache[:, 0], slots, 16), key)
    assert torch.equal(rows_at(cache[:, 1], slots, 16), value)
    assert cache.isnan().sum() == cache.numel() - 2 * key.numel()


@pytest.mark.parametrize("heads", [8, 6])
def test_a_head_first_cache_holds_a_head_of_a_block_in_one_piece(heads):
    cache = allocate_kv_cache(TOY, spec(layout=HND, num_kv_heads=heads), 10, "cpu")
    key, value = new_rows(1, heads)
    write_kv_cache(key, value, cache, torch.tensor([17]))
    physical = cache.permute(0, 1, 3, 2, 4)
    assert physical.is_contiguous()
    assert tuple(physical[:, 0].shape) == (10, heads, 16, 64)
    assert torch.equal(physical[1, 0, :, 1], key[0])


def test_negative_slots_are_not_written():
    cache = allocate_kv_cache(TOY, spec(), 4, "cpu").fill_(7.0)
    key, value = new_rows(3, 8)
    write_kv_cache(key, value, cache, torch.tensor([-1, 20, -1]))
    assert torch.equal(cache[1, 0, 4], key[1])
    cache[1, :, 4] = 7.0
    assert (cache == 7.0).all()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_write_into_a_shared_buffer_leaves_the_other_layers_alone(layers):
    specs = {str(i): spec(layout=HND) for i in range(layers + 1)}
    caches = allocate_kv_caches(dict.fromkeys(specs, TOY), specs, 4, "cpu")
    for cache in caches.values():
        cache.fill_(torch.nan)
    key, value = new_rows(2, 8)
    write_kv_cache(key, value, caches["0"], torch.tensor([63, 5]))
    assert torch.equal(rows_at(caches["0"][:, 1], [63, 5], 16), value)
    assert all(caches[str(i)].isnan().all() for i in range(1, layers + 1))


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
@pytest.mark.parametrize("scale", [torch.tensor([0.5]), torch.tensor([0.25, 4.0])])
def test_float8_rows_are_scaled_rounded_and_saturated(name, largest, scale):
    s = spec(num_kv_heads=2, kv_cache_dtype=name)
    cache = allocate_kv_cache(TOY, s, 2, "cpu")
    key, value = new_rows(4, 2)
    key[0, 0, 0], key[1, 1, 1] = 1e6, -1e6
    write_kv_cache(key, value, cache, torch.arange(4), scale, None)
    by_head = scale.expand(2).view(1, 2, 1)
    wanted = (key / by_head).clamp(-largest, largest).to(s.cache_dtype)
    assert torch.equal(cache[0, 0, :4].float(), wanted.float())
    assert cache[0, 0, 0, 0, 0].float() == largest
    assert cache[0, 0, 1, 1, 1].float() == -largest
    assert torch.equal(cache[0, 1, :4].float(), value.to(s.cache_dtype).float())


def test_a_scale_for_a_cache_that_is_not_scaled_is_refused_rather_than_ignored():
    with pytest.raises(ValueError, match="bfloat16 is not scaled"):
        quantize_to_cache(torch.ones(1, 2, 8), torch.tensor([0.5]), torch.bfloat16)


# Block sizes of manager and kernel


def test_a_slot_decodes_by_the_block_size_that_it_was_made_with():
    assert divmod(75849, 16) == (4740, 9)
    table = expand_block_table(torch.tensor([[4740]]), 16, 4)
    assert table.tolist() == [[18960, 18961, 18962, 18963]]
    assert divmod(75849, 4) == (18962, 1)


def test_an_expanded_table_leads_to_the_same_slots():
    manager, kernel, blocks = 8, 4, [3, 1, 0, 2]
    table = torch.tensor([blocks], dtype=torch.int32)
    finer = expand_block_table(table, manager, kernel)
    assert finer.dtype == torch.int32
    assert finer.shape == (1, 8)
    for position in range(32):
        slot = blocks[position // manager] * manager + position % manager
        assert int(finer[0, position // kernel]) * kernel + position % kernel == slot


def test_a_table_of_equal_block_sizes_stays_as_it_is():
    table = torch.tensor([[3, 1], [0, 0]])
    assert torch.equal(expand_block_table(table, 16, 16), table)


@pytest.mark.parametrize("kernel", [3, 16, 0, -4])
def test_a_kernel_block_that_does_not_divide_the_managers_is_refused(kernel):
    match = rf"kernel_block_size={kernel} does not divide block_size=8"
    with pytest.raises(ValueError, match=match):
        expand_block_table(torch.tensor([[1]]), 8, kernel)


def test_the_cache_of_another_block_size_is_written_by_its_own():
    """Slots below the cache's end land where the cache's own block size puts them."""
    coarse, fine = (allocate_kv_cache(TOY, spec(block_size=s), 32 // s, "cpu") for s in (8, 4))
    key, value = new_rows(32, 8)
    slots = torch.randperm(32)
    for cache, size in ((coarse, 8), (fine, 4)):
        write_kv_cache(key, value, cache, slots)
        assert torch.equal(rows_at(cache[:, 0], slots.tolist(), size), key)


# Sharing


def test_a_chain_of_sharing_ends_at_the_owner():
    specs = {name: spec() for name in "abcd"}
    assert resolve_kv_sharing({"b": "a", "c": "b"}, specs) == {"b": "a", "c": "a"}
    assert resolve_kv_sharing({"c": "b", "b": "a"}, specs) == {"c": "a", "b": "a"}
    assert resolve_kv_sharing({}, specs) == {}


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        ({"a": "a"}, "circle: a -> a"),
        ({"a": "b", "b": "a"}, "circle: a -> b -> a"),
        ({"c": "a", "a": "b", "b": "a"}, "circle: c -> a -> b -> a"),
        ({"a": "x"}, "unknown layer 'x' in the chain a -> x"),
        ({"x": "a"}, "unknown layer 'x'"),
        ({"a": "x", "x": "b"}, "unknown layer 'x' in the chain a -> x -> b"),
        ({"a": "windowed"}, "'a' cannot share the cache of 'windowed'"),
        ({"b": "a", "a": "wide"}, "'b' cannot share the cache of 'wide'"),
    ],
)
def test_sharing_that_cannot_be_is_refused(targets, match):
    specs = {name: spec() for name in "abc"}
    specs |= {"windowed": spec(SlidingWindowSpec, sliding_window=9), "wide": spec(head_size=128)}
    with pytest.raises(ValueError, match=match):
        resolve_kv_sharing(targets, specs)
