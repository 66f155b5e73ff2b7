"""The order in which each device tries the backends, and that looking does not wake the GPU."""

from __future__ import annotations

import pytest
import torch

from attnbackend import backend_names
from attnbackend.platforms import Platform, backend_priorities, current_platform

FA_FIRST = "FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION TURBOQUANT TORCH_SDPA"
TRITON_SECOND = (
    "FLASH_ATTN+TRITON_ATTN FLASH_ATTN TRITON_ATTN FLASHINFER FLEX_ATTENTION TURBOQUANT TORCH_SDPA"
)
FI_FIRST = "FLASHINFER FLASH_ATTN TRITON_ATTN FLEX_ATTENTION TURBOQUANT TORCH_SDPA"
MLA_LAST = "TORCH_MLA TORCH_MLA_SPARSE"
MLA_SM90 = (
    "FLASH_ATTN_MLA FLASHMLA FLASHINFER_MLA TRITON_MLA FLASH_ATTN_MLA_SPARSE FLASHMLA_SPARSE "
    f"TRITON_MLA_SPARSE {MLA_LAST}"
)
MLA_SM100 = (
    "FLASHINFER_MLA TOKENSPEED_MLA CUTLASS_MLA FLASH_ATTN_MLA FLASHMLA TRITON_MLA "
    f"FLASHMLA_SPARSE FLASHINFER_MLA_SPARSE TRITON_MLA_SPARSE {MLA_LAST}"
)
ROCM = "ROCM_ATTN ROCM_AITER_FA ROCM_AITER_UNIFIED_ATTN TRITON_ATTN TURBOQUANT TORCH_SDPA"
MLA_ROCM = (
    f"ROCM_AITER_MLA TRITON_MLA ROCM_AITER_TRITON_MLA ROCM_AITER_MLA_SPARSE TRITON_MLA_SPARSE {MLA_LAST}"
)
MLA_SM120 = f"TRITON_MLA FLASHINFER_MLA_SPARSE_SM120 TRITON_MLA_SPARSE {MLA_LAST}"

ORDERS = {
    "sm75": (Platform("cuda", (7, 5)), FA_FIRST, MLA_SM90),
    "sm80": (Platform("cuda", (8, 0)), FA_FIRST, MLA_SM90),
    "sm90": (Platform("cuda", (9, 0)), TRITON_SECOND, MLA_SM90),
    "sm100": (Platform("cuda", (10, 0)), FI_FIRST, MLA_SM100),
    "sm103": (Platform("cuda", (10, 3)), FI_FIRST, MLA_SM100),
    "sm110": (Platform("cuda", (11, 0)), FA_FIRST, MLA_SM90),
    "sm120": (Platform("cuda", (12, 0)), FA_FIRST, MLA_SM120),
    "cuda of unknown capability": (Platform("cuda", None), FA_FIRST, MLA_SM90),
    "rocm": (Platform("cuda", None, is_rocm=True), ROCM, MLA_ROCM),
    "xpu": (
        Platform("xpu", None), "FLASH_ATTN TRITON_ATTN TURBOQUANT TORCH_SDPA",
        f"TRITON_MLA XPU_MLA_SPARSE {MLA_LAST}",
    ),
    "cpu": (Platform("cpu", None), "CPU_ATTN TORCH_SDPA FLEX_ATTENTION", f"CPU_MLA {MLA_LAST}"),
    "mps": (Platform("mps", None), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("device", ORDERS)
def test_dense_layers_try_backends_in_the_order_of_their_device(device):
    platform, dense, _ = ORDERS[device]
    assert " ".join(backend_priorities(platform, use_mla=False)) == dense


@pytest.mark.parametrize("device", ORDERS)
def test_latent_layers_try_backends_in_the_order_of_their_device(device):
    platform, _, latent = ORDERS[device]
    assert " ".join(backend_priorities(platform, use_mla=True)) == latent


@pytest.mark.parametrize("device", ORDERS)
@pytest.mark.parametrize("use_mla", [False, True])
def test_an_order_names_known_backends_once(device, use_mla):
    order = backend_priorities(ORDERS[device][0], use_mla=use_mla)
    assert len(set(order)) == len(order)
    assert {part for name in order for part in name.split("+")} <= set(backend_names())


def poison(monkeypatch, *names):
    def fail(*args):
        raise AssertionError("CUDA was asked")

    for name in names:
        monkeypatch.setattr(torch.cuda, name, fail)


@pytest.mark.parametrize("device_type", ["cpu", "xpu", "meta"])
def test_another_device_does_not_wake_cuda(monkeypatch, device_type):
    poison(monkeypatch, "is_available", "get_device_capability", "init")
    assert current_platform(device_type) == Platform(device_type, None, torch.version.hip is not None)


def test_cuda_gives_its_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    assert current_platform("cuda") == Platform("cuda", (9, 0), False)


def test_cuda_that_is_not_there_is_not_asked_further(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    poison(monkeypatch, "get_device_capability")
    assert current_platform("cuda") == Platform("cuda", None, False)


def test_rocm_has_no_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    poison(monkeypatch, "is_available", "get_device_capability")
    assert current_platform("cuda") == Platform("cuda", None, True)
