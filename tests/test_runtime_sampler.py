from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from attnbackend.runtime import SamplingParams
from attnbackend.runtime.random_draws import draw_key, gumbel_draws, uniform_draws
from attnbackend.runtime.sampler import INVALID_TOKEN, Draw, filter_logits, sample_tokens
from attnbackend.runtime.started_step import SampledTokens, TokenMemory

GREEDY = SamplingParams()
RANDOM = SamplingParams(temperature=1.0)


def kept_slowly(logits: list[float], params: SamplingParams) -> set[int]:
    """The documented sets, token by token in Python floats."""
    kept = {t for t, x in enumerate(logits) if x > -math.inf}
    if params.top_k > 0:
        kept = {t for t in kept if sum(logits[u] > logits[t] for u in kept) < params.top_k}
    weight = {t: math.exp((logits[t] - max(logits)) / params.temperature) for t in kept}
    total = math.fsum(weight.values())

    def mass_above(logit: float) -> float:
        return math.fsum(weight[u] for u in kept if logits[u] > logit) / total

    mass = {logit: mass_above(logit) for logit in {logits[t] for t in kept}}
    return {t for t in kept if params.top_p == 1 or mass[logits[t]] < params.top_p}


def kept_set(logits: Tensor) -> set[int]:
    return set((logits > -torch.inf).nonzero().flatten().tolist())


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 2.5]),
        top_k=rng.choice([0, -1, 1, 2, 7, 39, 40, 1000]),
        top_p=rng.choice([1.0, 1e-9, 0.13, 0.5, 0.913, 0.999]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_kept_sets_equal_a_slow_independent_reading(dtype: torch.dtype, has_ties: bool) -> None:
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        logits = torch.randn(6, 40, generator=generator) * 2
        logits = (logits.round() if has_ties else logits).to(dtype)
        logits[2, 5:] = -torch.inf
        before = logits.clone()
        params = [random_params(rng) for _ in range(6)]
        found = filter_logits(logits, params)
        assert torch.equal(logits, before), "the caller's logits were changed"
        for row in range(6):
            assert kept_set(found[row]) == kept_slowly(logits[row].tolist(), params[row]), params[row]
            kept = found[row] > -torch.inf
            assert torch.equal(found[row][kept], logits[row][kept])


def test_ties_at_the_limit_of_top_k_and_top_p_are_kept_together() -> None:
    top_k, top_p = SamplingParams(temperature=1, top_k=2), SamplingParams(temperature=1, top_p=0.1)
    found = filter_logits(torch.tensor([[1.0, 3.0, 1.0, -9.0]] * 2), [top_k, top_p])
    assert [kept_set(row) for row in found] == [{0, 1, 2}, {1}]
    found = filter_logits(torch.tensor([[0.0, 0.0, -9.0]]), [top_p])
    assert kept_set(found[0]) == {0, 1}


def test_the_likeliest_token_survives_the_smallest_top_p() -> None:
    params = SamplingParams(temperature=1.0, top_p=1e-12)
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sample_tokens(logits, [Draw(params, 1, 0)]) == [1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [0.0, -1.0, 0.0]])
    assert sample_tokens(logits, [Draw(GREEDY, 0, 0)] * 2) == [1, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample_tokens(torch.empty(0, 9), []) == []


@pytest.mark.parametrize(
    "params",
    [GREEDY, RANDOM, SamplingParams(temperature=2, top_k=3, top_p=0.5)],
    ids=["greedy", "random", "filtered"],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_unusable_rows_are_marked_and_others_go_on(params: SamplingParams, bad: float) -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    draws = [Draw(params, row, 0) for row in range(4)]
    expected = sample_tokens(logits, draws)
    assert INVALID_TOKEN not in expected
    logits[1, 29] = bad
    logits[2] = -math.inf
    expected[1] = expected[2] = INVALID_TOKEN
    assert sample_tokens(logits, draws) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e300])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0e38, -3.0e38]])
    params = SamplingParams(temperature=temperature, top_p=0.99)
    (token,) = sample_tokens(logits, [Draw(params, 3, 1)])
    assert token in ({0, 2, 3} if temperature > 1 else {2})


def test_a_row_depends_on_its_own_seed_and_index_alone() -> None:
    rng = random.Random(4)
    logits = torch.randn(12, 64, generator=torch.Generator().manual_seed(9))
    draws = [Draw(random_params(rng) if row % 3 else GREEDY, row // 2, row) for row in range(12)]
    alone = [sample_tokens(logits[row : row + 1], [draws[row]])[0] for row in range(12)]
    for _ in range(5):
        order = rng.sample(range(12), 12)
        together = sample_tokens(logits[order], [draws[row] for row in order])
        assert together == [alone[row] for row in order]


def test_other_indices_and_seeds_give_other_tokens() -> None:
    logits = torch.zeros(64, 1000)
    by_index = sample_tokens(logits, [Draw(RANDOM, 7, i) for i in range(64)])
    by_seed = sample_tokens(logits, [Draw(RANDOM, s, 0) for s in range(64)])
    assert len(set(by_index)) > 55
    assert len(set(by_seed)) > 55


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_every_allowed_seed_gives_a_key_that_fits_in_64_bits(seed: int) -> None:
    keys = [draw_key(seed, index) for index in (0, 1, 10**6)]
    assert len(set(keys)) == 3
    assert all(-(2**63) <= key < 2**63 for key in keys)


def splitmix64(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_uniform_draws_are_the_published_splitmix64_stream() -> None:
    # First outputs for state 0, as published with the reference implementation.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    key = -5
    found = uniform_draws(torch.tensor([0, key]), 3)
    own = [splitmix64((key + 0x9E3779B97F4A7C15 * (i + 1)) % 2**64) for i in range(3)]
    for row, stream in enumerate([published, own]):
        expected = torch.tensor([bits / 2**64 for bits in stream], dtype=torch.float64)
        assert torch.allclose(found[row].double(), expected, rtol=2**-23, atol=2**-52)


def splitmix64_inverse(value: int) -> int:
    """The state whose output is the value."""

    def unshift(bits: int, amount: int) -> int:
        found = bits
        for _ in range(64 // amount):
            found = bits ^ found >> amount
        return found

    value = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    value = unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(value, 30)


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest", "largest"])
def test_the_extreme_draws_are_finite(bits: int) -> None:
    state = splitmix64_inverse(bits)
    assert splitmix64(state) == bits
    key = (state - 0x9E3779B97F4A7C15) % 2**64
    keys = torch.tensor([key - 2**64 if key >= 2**63 else key])
    assert 0 < float(uniform_draws(keys, 1)) < 1
    assert math.isfinite(float(gumbel_draws(keys, 1)))


def test_uniform_draws_lie_strictly_inside_the_unit_interval() -> None:
    draws = uniform_draws(torch.arange(50), 10_000)
    assert float(draws.min()) > 0
    assert float(draws.max()) < 1
    assert abs(float(draws.mean()) - 0.5) < 5 * (1 / 12 / draws.numel()) ** 0.5


def test_the_nucleus_is_exact_where_it_is_larger_than_the_first_look() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 1400, generator=generator) * torch.tensor([[0.0], [0.01], [6.0]])
    params = [SamplingParams(temperature=1.0, top_p=0.9) for _ in range(3)]
    found = filter_logits(logits, params)
    sizes = [len(kept_set(row)) for row in found]
    assert sizes[0] == 1400
    assert 1200 < sizes[1] < 1300
    assert sizes[2] < 100
    for row in range(3):
        assert kept_set(found[row]) == kept_slowly(logits[row].tolist(), params[row])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
    ],
    ids=["plain", "cold", "top_k", "top_p"],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5, 0.3])
    count = 20_000
    tokens = sample_tokens(logits.expand(count, -1), [Draw(params, 11, i) for i in range(count)])
    kept = kept_slowly(logits.tolist(), params)
    weights = {t: math.exp(float(logits[t]) / params.temperature) for t in kept}
    assert set(tokens) == kept
    chi_squared = 0.0
    for token, weight in weights.items():
        expected = count * weight / sum(weights.values())
        chi_squared += (tokens.count(token) - expected) ** 2 / expected
    assert chi_squared < 25, "above the 0.9999 quantile for 5 degrees of freedom"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [None, "inf", "-inf", "nan", "-nan"])
def test_tokens_of_logits_that_are_not_finite_are_told_from_those_of_large_ones(
    dtype: torch.dtype, odd: str | None
) -> None:
    largest = torch.tensor([0.0, torch.finfo(dtype).max, -1.5, torch.finfo(dtype).min, 1.0], dtype=dtype)
    if odd is not None:
        largest[2] = float(odd.removeprefix("-")) * (-1 if odd[0] == "-" else 1)
    memory = TokenMemory.on(torch.device("cpu"), 7, dtype)
    for x, values in zip(memory.leading(5), (torch.arange(5), largest), strict=True):
        x.copy_(values)
    tokens = SampledTokens(7, torch.device("cpu")).start(memory, [object()] * 5).tokens()  # type: ignore[list-item]
    assert tokens == [0, 1, 2 if odd is None else INVALID_TOKEN, 3, 4]
