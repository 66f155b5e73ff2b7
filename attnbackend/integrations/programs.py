"""A transformers model's serving step as one exported program, with its paged caches as inputs.

Shape legend: T tokens, L tokens whose logits are wanted, V vocabulary, R requests, W block-table width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnbackend.fx_passes import GraphPass, PassManager, SelectBackend
from attnbackend.fx_passes.choices import BackendChoice
from attnbackend.integrations.latent_attention import adopt_latent_module, release_latent_module
from attnbackend.integrations.transformers import BOUND, CHUNK, TransformersModel
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.layers.paged import BatchTensors, BoundLayer
from attnbackend.selector import AttentionSelectorConfig

__all__ = ["ModelStep", "export_model"]


class ModelStep(nn.Module):
    """One step of a causal language model as a function of tensors alone.

    Args:
        model: as `TransformersModel` takes it; its attention implementation is set to "attnbackend".
        block_size: tokens a block of the caches.

    Raises:
        TypeError, ValueError: as `TransformersModel`.
    """

    def __init__(self, model: Any, *, block_size: int = 16) -> None:
        super().__init__()
        self._served = TransformersModel(model)
        self.model = model
        self.block_size = block_size
        self._layers = self._served.attention_layers()

    def new_caches(self, num_blocks: int) -> list[Tensor]:
        """Zeros for each layer with a cache of its own, in their order.

        [num_blocks, 2, block_size, K, D], or of latent attention [num_blocks, block_size, D].
        """
        configs = [layer.config for layer in self._layers.values() if layer.kv_sharing_target is None]
        return [
            torch.zeros(
                *_cache_shape(config, num_blocks, self.block_size),
                dtype=resolve_kv_cache_dtype("auto", config.dtype), device=self._served.device,
            )
            for config in configs
        ]  # fmt: skip

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors,
        kv_caches: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """Writes the tokens' keys and values to the caches and computes logits.

        Args:
            input_ids, positions: int64 [T].
            logits_indices: int64 [L], places among the T tokens.
            batch: where the tokens belong.
            kv_caches: as `new_caches` gives them; written.

        Returns:
            [L, V].
        """
        with self._bound(kv_caches):
            return self._served.step(input_ids, positions, logits_indices, batch).logits[0]

    @contextmanager
    def _bound(self, kv_caches: Sequence[Tensor]) -> Iterator[None]:
        modules, rest = dict(self.model.named_modules()), iter(kv_caches)
        caches: dict[str, Tensor] = {}
        try:
            for name, layer in self._layers.items():
                target = layer.kv_sharing_target
                caches[name] = next(rest) if target is None else caches[target]
                bound = BoundLayer(caches[name], writes_cache=target is None)
                # Past the module's own bookkeeping: to a tracer these are no attributes of the model.
                modules[name].__dict__[BOUND] = bound
                modules[name].__dict__[CHUNK] = layer.config.attention_chunk_size
                if layer.config.use_mla:
                    adopt_latent_module(modules[name])
            yield
        finally:
            for name in self._layers:
                modules[name].__dict__.pop(BOUND, None)
                modules[name].__dict__.pop(CHUNK, None)
                release_latent_module(modules[name])


def _cache_shape(config: AttentionSelectorConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    if config.use_mla:
        return (num_blocks, block_size, config.head_size)
    return (num_blocks, 2, block_size, config.num_kv_heads, config.head_size)


def export_model(
    model: Any, *, backend: BackendChoice = None, passes: Sequence[GraphPass] | None = None,
    max_num_seqs: int = 8, max_model_len: int = 256, max_num_batched_tokens: int = 2048, block_size: int = 16,
) -> torch.export.ExportedProgram:  # fmt: skip
    """A serving step of a model as a program that can be saved, loaded, packaged by AOTInductor, and run.

    The program takes what `ModelStep.forward` takes, and the caches are inputs: it has none of its own. From
    2 to ``max_num_batched_tokens`` tokens go in one step (add a token of slot -1, behind the last request's,
    to a step of one token), and from 2 blocks up in a cache. Requests are rows of fixed tensors:
    ``max_num_seqs`` rows, of seq_len 0 where there is no request, and block tables ``max_model_len /
    block_size`` wide.

    Args:
        model: a transformers causal language model in evaluation mode.
        backend: as in `attnbackend.compile`.
        passes: as in `attnbackend.compile`; None: `SelectBackend` alone.

    Raises:
        TypeError, ValueError: as `TransformersModel`.
    """
    step = ModelStep(model, block_size=block_size)
    width = -(-max_model_len // block_size)
    example = _example(step, max_num_seqs, width)
    tokens = torch.export.Dim("tokens", min=2, max=max_num_batched_tokens)
    logits = torch.export.Dim("logits", min=1, max=max_num_batched_tokens)
    blocks = torch.export.Dim("blocks", min=2)
    caches = [{0: blocks} for _ in example[4]]
    batch = BatchTensors({0: tokens}, None, None, None)  # type: ignore[arg-type]
    dynamic = ({0: tokens}, {0: tokens}, {0: logits}, batch, caches)
    with torch.no_grad():
        program = torch.export.export(step, example, dynamic_shapes=dynamic, strict=False)
    PassManager([SelectBackend(backend)] if passes is None else passes).run_on(program)
    return program


def _example(
    step: ModelStep, num_seqs: int, width: int
) -> tuple[Tensor, Tensor, Tensor, BatchTensors, list[Tensor]]:
    """A batch of one request of five tokens; its sizes are no constants of the program unless fixed."""
    caches = step.new_caches(num_blocks=7)
    device = caches[0].device
    positions = torch.arange(5, device=device)
    starts = torch.full((num_seqs + 1,), 5, dtype=torch.int32, device=device)
    starts[0] = 0
    lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    lens[0] = 5
    table = torch.zeros(num_seqs, width, dtype=torch.int32, device=device)
    table[0, 0] = 1
    batch = BatchTensors(positions + step.block_size, starts, lens, table)
    return torch.ones_like(positions), positions, torch.tensor([3, 4], device=device), batch, caches
