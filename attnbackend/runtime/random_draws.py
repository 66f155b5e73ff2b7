"""Random numbers that are a function of (seed, output index, token id) and nothing else.

They are the splitmix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014; finaliser constants by D. Stafford, "Mix13"). Integer arithmetic makes them the
same on every device, and no generator has a state that the order of a batch could disturb.

Shape suffixes: M rows that sample, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_DRAW_BITS = 52
_LARGEST_BELOW_1 = 1 - 2.0**-24


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * _MIX_1 & _MASK
    value = (value ^ value >> 27) * _MIX_2 & _MASK
    return value ^ value >> 31


def draw_key(seed: int, output_index: int) -> int:
    """Start of the stream for one output token, as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed) + _GOLDEN * (output_index + 1)))


def seed_state(seed: int) -> int:
    """What `draw_keys` takes for a seed, an unsigned 64-bit integer."""
    return _mix(seed)


def draw_keys(states: npt.NDArray[np.uint64], output_indices: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """`draw_key` of many tokens at once, from the `seed_state` of each."""
    bits = states + np.uint64(_GOLDEN) * (output_indices.astype(np.uint64) + np.uint64(1))
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(_MIX_1)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(_MIX_2)
    return (bits ^ bits >> np.uint64(31)).view(np.int64)


def _shift_right(bits: Tensor, amount: int) -> Tensor:
    # int64 shifts copy the sign bit; the mask takes the copies away.
    return (bits >> amount).bitwise_and_(2 ** (64 - amount) - 1)


def uniform_draws(keys_M: Tensor, vocab_size: int) -> Tensor:
    """Uniform float32 [M, V] strictly between 0 and 1, one for each key (int64) and token id.

    Small values have all the precision of a float32, down to 2**-53.
    """
    steps_V = torch.arange(1, vocab_size + 1, device=keys_M.device) * _signed(_GOLDEN)
    bits_MV = keys_M[:, None] + steps_V
    bits_MV = (bits_MV ^ _shift_right(bits_MV, 30)).mul_(_signed(_MIX_1))
    bits_MV = (bits_MV ^ _shift_right(bits_MV, 27)).mul_(_signed(_MIX_2))
    bits_MV ^= _shift_right(bits_MV, 31)
    draws_MV = _shift_right(bits_MV, 64 - _DRAW_BITS).to(torch.float32)
    return draws_MV.add_(0.5).mul_(2.0**-_DRAW_BITS).clamp_(max=_LARGEST_BELOW_1)


def gumbel_draws(keys_M: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel float32 [M, V]: argmax(logits + draws) follows softmax(logits).

    E. J. Gumbel, "Statistical Theory of Extreme Values", 1954: -log(-log(1 - u)). What wins is
    a small u, and log1p keeps its precision; -log(-log(u)) in float32 would give an infinite draw
    once in 2**24, to one in 170 rows of 1e5 tokens.
    """
    return uniform_draws(keys_M, vocab_size).neg_().log1p_().neg_().log_().neg_()
