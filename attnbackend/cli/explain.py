"""``attnbackend explain``: the backend chosen for a layer, and what stands against the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbackend.cli import EXIT_NOT_POSSIBLE
from attnbackend.cli.choices import (
    backend_choice,
    compute_capability,
    device_type,
    dtype_choice,
    kv_cache_dtype_choice,
)
from attnbackend.cli.errors import UserError, user_errors

if TYPE_CHECKING:
    from attnbackend.cli.layer_kinds import LayerKind
    from attnbackend.explanation import Explanation

__all__ = ["explain"]

_NOT_ASKED: dict[str, Any] = {
    "head_size": None, "num_heads": None, "num_kv_heads": None, "sliding_window": None,
    "attention_chunk_size": None, "attn_type": "decoder",
    "logits_soft_cap": 0.0, "causal": True, "has_alibi": False, "has_sinks": False,
    "has_bidirectional_ranges": False, "use_mla": False,
}  # fmt: skip
"""What describes a layer, as it is when the option is left out: a model says these itself."""


_ModelPath = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR_OR_GGUF",
        help="Explain every kind of layer of this model, in place of --head-size and the like.",
    ),
]
_HeadSize = Annotated[int | None, typer.Option(min=1, help="Elements a head.")]
_NumHeads = Annotated[int | None, typer.Option(min=1, help="Query heads.")]
_NumKVHeads = Annotated[int | None, typer.Option(min=1, help="Key-value heads. Default: as --num-heads.")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda or xpu. Default: CUDA where there is one.")]
_Capability = Annotated[
    str | None,
    typer.Option("--compute-capability", help="Such as 9.0. Default: that of the device here."),
]
_Dtype = Annotated[
    str,
    typer.Option(help="float32, bfloat16, float16 or auto: float32 on CPUs, else bfloat16."),
]
_KVCacheDtype = Annotated[str, typer.Option(help="Such as fp8. auto: as --dtype.")]
_BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens a block. Default: left open.")]
_SlidingWindow = Annotated[int | None, typer.Option(min=1, help="Keys a token sees, itself included.")]
_AttentionChunk = Annotated[
    int | None, typer.Option(min=1, help="Positions of a chunk; a token sees its own chunk only.")
]
_AttnType = Annotated[
    str, typer.Option(help="decoder, encoder, encoder_only or encoder_decoder (cross attention).")
]
_SoftCap = Annotated[float, typer.Option(min=0, help="Cap of the logits; 0 for none.")]
_Causal = Annotated[bool, typer.Option("--causal/--non-causal")]
_Alibi = Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")]
_Sinks = Annotated[bool, typer.Option("--sinks", help="With attention sinks.")]
_Ranges = Annotated[
    bool, typer.Option("--bidirectional-ranges", help="With ranges of tokens that see each other.")
]
_MLA = Annotated[bool, typer.Option("--mla", help="Multi-head latent attention.")]
_LSE = Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted too.")]
_BackendName = Annotated[str | None, typer.Option(metavar="NAME", help="Explain this backend being named.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a kind of layer.")]


def explain(
    model: _ModelPath = None,
    head_size: _HeadSize = None,
    num_heads: _NumHeads = None,
    num_kv_heads: _NumKVHeads = None,
    device: _Device = None,
    capability: _Capability = None,
    dtype: _Dtype = "auto",
    kv_cache_dtype: _KVCacheDtype = "auto",
    block_size: _BlockSize = None,
    sliding_window: _SlidingWindow = None,
    attention_chunk: _AttentionChunk = None,
    attn_type: _AttnType = "decoder",
    soft_cap: _SoftCap = 0.0,
    causal: _Causal = True,
    alibi: _Alibi = False,
    sinks: _Sinks = False,
    ranges: _Ranges = False,
    mla: _MLA = False,
    lse: _LSE = False,
    backend: _BackendName = None,
    as_json: _AsJson = False,
) -> None:
    """Say which backend is chosen for a layer, and what stands against each of the others.

    Exits with 1 when none can serve.
    """
    layer = {
        "head_size": head_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "sliding_window": sliding_window, "attention_chunk_size": attention_chunk,
        "attn_type": attn_type, "logits_soft_cap": soft_cap, "causal": causal, "has_alibi": alibi,
        "has_sinks": sinks, "has_bidirectional_ranges": ranges, "use_mla": mla,
    }  # fmt: skip
    with user_errors():
        named = backend_choice(backend, implemented=False)
        on_device = device_type(device)
        common = {
            "device_type": on_device,
            "compute_capability": compute_capability(capability, on_device),
            "dtype": dtype_choice(dtype, on_device),
            "kv_cache_dtype": kv_cache_dtype_choice(kv_cache_dtype),
            "block_size": block_size,
            "needs_lse": lse,
        }
        kinds = _described(layer, common) if model is None else _of_model(model, layer, common)
        _report(kinds, named, as_json)


def _described(layer: dict[str, Any], common: dict[str, Any]) -> list[LayerKind]:
    from attnbackend.cli.layer_kinds import LayerKind
    from attnbackend.selector import AttentionSelectorConfig

    if layer["head_size"] is None or layer["num_heads"] is None:
        raise UserError("give --head-size and --num-heads to describe a layer, or --model")
    kv_heads = layer["num_kv_heads"] or layer["num_heads"]
    fields = {**layer, **common, "num_kv_heads": kv_heads}
    return [LayerKind((), AttentionSelectorConfig.dense(**fields))]


def _of_model(model: Path, layer: dict[str, Any], common: dict[str, Any]) -> list[LayerKind]:
    from attnbackend.cli.layer_kinds import layer_kinds

    given = [name for name, value in layer.items() if value != _NOT_ASKED[name]]
    if given:
        raise UserError(
            f"--model says {', '.join(given)} itself; leave that out, or describe a layer without --model"
        )
    return layer_kinds(model, common)


def _report(kinds: list[LayerKind], backend: str | None, as_json: bool) -> None:
    from attnbackend.explanation import explain as explain_choice

    explained = [(kind, explain_choice(kind.config, backend=backend)) for kind in kinds]
    if as_json:
        found = [{"layers": list(kind.layers), **e.to_dict()} for kind, e in explained]
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n\n".join(_text(kind, e) for kind, e in explained))
    if any(explanation.selected is None for _, explanation in explained):
        raise typer.Exit(EXIT_NOT_POSSIBLE)


def _text(kind: LayerKind, explanation: Explanation) -> str:
    return f"{kind.title}\n{explanation}" if kind.layers else str(explanation)
