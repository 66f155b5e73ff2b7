"""A folder of built files that is safe to share: whole files or none, one builder at a time, no litter.

A file ends with a digest of what comes before it, which loaders of machine code do not look at. So a file
that was cut short, by a full disk or a copy, is known for what it is before anything of it runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["folder_lock", "is_whole", "say", "write_whole"]

_MARK = b"attnbackend digest:"
_DIGEST_BYTES = 32
_PREFIX = "building-"


def say(line: str) -> None:
    """One line to a person, on stderr."""
    print(f"attnbackend: {line}", file=sys.stderr, flush=True)


def is_whole(path: Path) -> bool:
    """Whether the file is there, with all that was built."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, mark, digest = content.rpartition(_MARK)
    return bool(mark) and hashlib.sha256(body).digest() == digest


def write_whole(target: Path, build: Callable[[Path, Path], None]) -> None:
    """Builds beside the target and renames, so that others see all of it or nothing. Hold the lock.

    Args:
        target: the file.
        build: called with a file to write and a folder for whatever else it writes; both are removed after.

    Raises:
        OSError: the folder cannot be written to.
    """
    _remove_litter(target.parent)
    scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target.parent))
    try:
        built = scratch / "built"
        build(built, scratch)
        digest = hashlib.sha256(built.read_bytes()).digest()
        with built.open("ab") as file:
            file.write(_MARK + digest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(built, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_litter(folder: Path) -> None:
    """What builders that were killed left behind: under the lock, nobody else is building."""
    for left in folder.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """One process at a time; a process that dies lets go.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that builds {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
