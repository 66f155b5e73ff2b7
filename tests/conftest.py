"""Shared set-up: Triton interpreted where there is no GPU, one compile cache a run, clean state a test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: workers that share cores must not spin for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"attnbackend-tests-{os.getppid()}"),
)

DEVICE = "cuda" if HAS_CUDA else "cpu"


@pytest.fixture(autouse=True)
def _no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNBACKEND", raising=False)
    monkeypatch.delenv("ATTNBACKEND_DEBUG", raising=False)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
