"""DeepSeek at the sizes that libraries take, in bfloat16 on a GPU, held to transformers in float64."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from latent_zoo import LIBRARY_SIZES, make_latent_model
from mla_op_cases import require_mla
from model_zoo import EagerReference
from served_logits import KINDS, judge, make_engine, serve

from attnbackend import set_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PAGES = {"FLASHMLA": 64}
"""Sizes of blocks where they are not 16."""
BACKENDS = ["TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TORCH_MLA"]


@cache
def model_and_reference(name: str) -> tuple[Any, EagerReference]:
    model = make_latent_model(name, **LIBRARY_SIZES).bfloat16()
    return copy.deepcopy(model).cuda(), EagerReference(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_served_logits_are_right_in_every_kind_of_batch(backend: str, name: str, compiled: bool) -> None:
    page = PAGES.get(backend, 16)
    require_mla(backend, torch.bfloat16, head_size=576, kv_lora_rank=512, num_heads=16, block_size=page)
    model, reference = model_and_reference(name)
    with set_config(mla_context_tokens=16):
        served = serve(
            make_engine(model, backend, compile=compiled, cudagraph_mode="NONE", block_size=page), long=50
        )
    assert set(judge(served, reference)) == KINDS
