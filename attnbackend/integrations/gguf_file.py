"""What can be said of a GGUF file without its tensors: whether it is whole, and one reader for it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_gguf_file", "one_gguf_reader"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the fixed-size metadata types, by the format's type number."""
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class _Broken(Exception):
    """What is wrong with the file, in words that follow its name."""


def check_gguf_file(path: Path) -> None:
    """Check magic, version, tensor table and file size; reads the header alone.

    Raises:
        ValueError: not a GGUF file, a version other than 2 and 3, a damaged header, or a file
            shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            _check(_Cursor(file, path.stat().st_size))
    except _Broken as broken:
        raise ValueError(f"{path} {broken}") from None


class _Cursor:
    """Reads the header and refuses to go past the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        self._require(count)
        self.position += count
        return self.file.read(count)

    def skip(self, count: int) -> None:
        self._require(count)
        self.position += count
        self.file.seek(count, 1)

    def numbers(self, code: str) -> tuple[int, ...]:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))

    def string(self) -> bytes:
        return self.take(self.numbers("Q")[0])

    def _require(self, count: int) -> None:
        if count > self.size - self.position:
            raise _Broken(
                f"is cut off or damaged: its header goes on past the end of the file at "
                f"{self.size} bytes; copy or download it again"
            )


def _check(cursor: _Cursor) -> None:
    if cursor.size < len(_MAGIC) or cursor.take(len(_MAGIC)) != _MAGIC:
        raise _Broken(
            f"is not a GGUF file: it does not begin with {_MAGIC.decode()}; give a GGUF file or a "
            "folder that transformers' save_pretrained wrote"
        )
    version, num_tensors, num_fields = cursor.numbers("IQQ")
    if version not in _VERSIONS:
        raise _Broken(
            f"is GGUF version {version}, and versions 2 and 3 (little-endian) can be read; convert "
            "it again with a current converter"
        )
    alignment = _read_alignment(cursor, num_fields)
    end = max((_tensor_end(cursor) for _ in range(num_tensors)), default=0)
    needed = -(-cursor.position // alignment) * alignment + end
    if cursor.size < needed:
        raise _Broken(
            f"is cut off: it has {cursor.size} bytes and its header says {needed}; copy or download it again"
        )


def _read_alignment(cursor: _Cursor, num_fields: int) -> int:
    """Pass over all metadata; the value of general.alignment."""
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(num_fields):
        key = cursor.string()
        (kind,) = cursor.numbers("I")
        if key == b"general.alignment" and kind == 4:
            (alignment,) = cursor.numbers("I")
        else:
            _skip_value(cursor, kind)
    if alignment < 1:
        raise _Broken(f"is damaged: general.alignment={alignment} must be positive")
    return alignment


def _skip_value(cursor: _Cursor, kind: int) -> None:
    if kind == _STRING:
        cursor.skip(cursor.numbers("Q")[0])
    elif kind == _ARRAY:
        element, count = cursor.numbers("IQ")
        if element in _WIDTH:
            cursor.skip(_WIDTH[element] * count)
        else:
            for _ in range(count):
                _skip_value(cursor, element)
    elif kind in _WIDTH:
        cursor.skip(_WIDTH[kind])
    else:
        raise _Broken(f"is damaged: unknown metadata type {kind} near byte {cursor.position}")


def _tensor_end(cursor: _Cursor) -> int:
    """Read an entry of the tensor table: where the tensor ends, from the start of the data."""
    name = cursor.string()
    (num_dims,) = cursor.numbers("I")
    if not 0 < num_dims <= _MAX_DIMS:
        raise _Broken(f"is damaged: tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    dims = cursor.numbers(f"{num_dims}Q")
    kind, offset = cursor.numbers("IQ")
    sizes = _block_sizes()
    if kind not in sizes:
        raise _Broken(
            f"holds tensor {name!r} in the quantization type {kind}, unknown to the installed gguf "
            "package; update it with: pip install -U gguf"
        )
    block_elements, block_bytes = sizes[kind]
    return offset + math.prod(dims) // block_elements * block_bytes


@functools.cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Quantization type number -> (elements, bytes) of a block."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


_READER_LOCK = threading.Lock()


@contextmanager
def one_gguf_reader() -> Iterator[None]:
    """Inside the block, parse each GGUF file's header once and each table of tensor names once.

    transformers parses the header for the tokenizer, the config and the weights, and builds the
    table for every module of the model. Both are looked up in the gguf package at each use, so
    remembered forms stand in there for a while; a version that looks them up elsewhere is as slow
    as before. For SmolLM2-135M, 30 layers and a vocabulary of 49,152, loading took half the time.
    """
    import gguf

    with _READER_LOCK:
        own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        try:
            for name, function in own.items():
                setattr(gguf, name, functools.cache(function))
            yield
        finally:
            for name, function in own.items():
                setattr(gguf, name, function)
