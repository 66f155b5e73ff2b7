"""One layer's step over its paged cache: write the new tokens, attend to all.

Shape legend: T tokens, R requests, W block-table width, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attnbackend._torch_compat import register_namedtuple
from attnbackend.ops import attention, kv_cache_update

__all__ = ["BatchTensors", "BoundLayer", "DecodeTensors", "write_and_attend"]


class BatchTensors(NamedTuple):
    """The step's batch as attention layers need it; inputs of a compiled graph."""

    slot_mapping: Tensor
    """int64 [T]."""
    query_start_loc: Tensor
    """int32 [R+1]."""
    seq_lens: Tensor
    """int32 [R]."""
    block_table: Tensor
    """int32 [R, W]."""


class DecodeTensors(BatchTensors):
    """A batch in which no request brings more than one token.

    Layers of latent attention then compile to their latent form: right for any batch, fast for such.
    """

    __slots__ = ()


for _batch in (BatchTensors, DecodeTensors):
    register_namedtuple(_batch)


class BoundLayer(NamedTuple):
    """What the runtime gives a layer."""

    kv_cache: Tensor
    kv_cache_dtype: str = "auto"
    group: int = -1
    """KV cache group, whose plan of a step applies."""
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    writes_cache: bool = True
    """False: the cache is another layer's, which has written the step's keys and values before."""

    def __deepcopy__(self, memo: object) -> None:
        """A copied model has no cache: it is the engine's, not the model's."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nor has a saved one."""
        return type(None), ()


def write_and_attend(
    query: Tensor, key: Tensor | None, value: Tensor | None, layer: BoundLayer, batch: BatchTensors,
    **features: Any,
) -> Tensor:  # fmt: skip
    """Attention of the new tokens over the layer's cache, the new tokens included.

    Args:
        query: [T, H, D].
        key, value: [T, K, D]; written to the cache first. None where the cache is another layer's.
        layer: the cache and its scales.
        batch: where the tokens belong.
        features: ``scale`` and the optional keyword arguments of the attention op.

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: keys for a layer that writes none, or none for one that does.
    """
    shared: dict[str, Any] = {
        "k_scale": layer.k_scale, "v_scale": layer.v_scale, "kv_cache_dtype": layer.kv_cache_dtype,
        "group": layer.group,
    }  # fmt: skip
    if (key is None or value is None) is layer.writes_cache:
        given = "None" if key is None or value is None else "given"
        raise ValueError(
            f"key and value are {given} and writes_cache={layer.writes_cache}; a layer with a cache of its "
            "own takes both, one that reads another's takes None for both"
        )
    if key is not None and value is not None:
        kv_cache_update(key, value, layer.kv_cache, batch.slot_mapping, **shared)
    output = query.new_empty(query.shape)
    attention(
        query, key, value, layer.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
        **features, **shared,
    )  # fmt: skip
    return output
