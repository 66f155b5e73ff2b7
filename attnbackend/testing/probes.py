"""Inputs made so that a feature decides the answer.

With unit-normal data many faults move the output less than rounding does: attention over a thousand
keys averages them away. Each probe plants the one thing that a wrong kernel would see differently.

Shape suffixes: N query tokens of one request, L keys of one request, H query heads, K key/value
heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnbackend.testing.cases import AttentionCase

__all__ = ["SequenceData", "apply_probe"]

EDGE_LOGIT = 12.0
"""Logit of the planted keys: exp(12) = 160,000 outweighs the rest of any window under test."""
EDGE_VALUE = 4.0
"""Value of the planted keys, well outside unit-normal averages and exact in every format."""


@dataclass(frozen=True)
class SequenceData:
    """One request before it is put in pages, float32 on the CPU."""

    q_NHD: Tensor
    k_LKD: Tensor
    v_LKD: Tensor


def apply_probe(case: AttentionCase, sequence: SequenceData) -> None:
    """Change ``sequence`` in place as ``case.probe`` says; nothing for None.

    Raises:
        ValueError: ``window_edge``, ``chunk_edge`` or ``newest_key`` under a soft-cap that flattens their
            logits.
    """
    if case.probe in ("window_edge", "chunk_edge", "newest_key") and 0 < case.logits_soft_cap < EDGE_LOGIT:
        raise ValueError(
            f'probe="{case.probe}" plants logits of {EDGE_LOGIT}, which logits_soft_cap='
            f"{case.logits_soft_cap} would flatten; use 0 or at least {EDGE_LOGIT}"
        )
    if case.probe == "value_is_head":
        _value_is_head(sequence)
    elif case.probe == "low_logits":
        _low_logits(case, sequence)
    elif case.probe == "long_sums":
        _long_sums(sequence)
    elif case.probe == "soft_cap":
        # q.k * scale is unit-normal before this: afterwards logits lie around and beyond the cap.
        sequence.q_NHD.mul_(case.logits_soft_cap)
    elif case.probe == "window_edge":
        _window_edge(case, sequence)
    elif case.probe == "chunk_edge":
        _chunk_edge(case, sequence)
    elif case.probe == "newest_key":
        _newest_key(case, sequence)


def _value_is_head(sequence: SequenceData) -> None:
    """Every value of key/value head h is h: the output of a query head names what it read."""
    for head in range(sequence.v_LKD.shape[1]):
        sequence.v_LKD[:, head] = float(head)


def _low_logits(case: AttentionCase, sequence: SequenceData) -> None:
    """All logits of a row are lower by 200, which changes no weight: exp(-200) is 0 in float32."""
    sequence.q_NHD[..., 0] = 32.0
    sequence.k_LKD[..., 0] = -200.0 / (32.0 * case.softmax_scale)


def _long_sums(sequence: SequenceData) -> None:
    """Sums that only grow, over all keys alike: kept in 16 bits they soon lose what is added."""
    sequence.q_NHD.mul_(2.0**-6)
    sequence.v_LKD.abs_()


def _window_edge(case: AttentionCase, sequence: SequenceData) -> None:
    """Both sides of the left edge of the newest token's window hold keys that match its query.

    The right answer is close to +EDGE_VALUE, the value of the oldest key inside. A window one too
    wide halves the way to -EDGE_VALUE, the value just outside; one too narrow loses both keys.
    Other tokens of the request keep their unit-normal data.
    """
    assert case.sliding_window is not None
    _plant_edge(case, sequence, sequence.k_LKD.shape[0] - 1 - case.sliding_window)


def _chunk_edge(case: AttentionCase, sequence: SequenceData) -> None:
    """As `_window_edge`, for the first key of the newest token's chunk."""
    assert case.attention_chunk_size is not None
    newest = sequence.k_LKD.shape[0] - 1
    _plant_edge(case, sequence, newest // case.attention_chunk_size * case.attention_chunk_size - 1)


def _plant_edge(case: AttentionCase, sequence: SequenceData, outside: int) -> None:
    """A matching key on each side of an edge, ``outside`` the last position that is not seen."""
    if outside >= 0:
        _plant(case, sequence, outside, -EDGE_VALUE)
        _plant(case, sequence, outside + 1, EDGE_VALUE)


def _newest_key(case: AttentionCase, sequence: SequenceData) -> None:
    """The newest token attends to itself: without its key the answer is a unit-normal average."""
    if sequence.k_LKD.shape[0] > 0:
        _plant(case, sequence, sequence.k_LKD.shape[0] - 1, EDGE_VALUE)


def _plant(case: AttentionCase, sequence: SequenceData, position: int, value: float) -> None:
    """A key at ``position`` that the newest query finds with a logit of EDGE_LOGIT in all heads."""
    if sequence.q_NHD.shape[0] == 0:
        return
    group = case.num_heads // case.num_kv_heads
    for head in range(case.num_kv_heads):
        query_D = sequence.q_NHD[-1, head * group].clone()
        sequence.q_NHD[-1, head * group : (head + 1) * group] = query_D
        stretch = EDGE_LOGIT / (case.softmax_scale * float(query_D @ query_D))
        sequence.k_LKD[position, head] = query_D * stretch
        sequence.v_LKD[position, head] = value
