"""The serving loop: block allocator, scheduler, input batch, sampler, engine."""

from __future__ import annotations

from attnbackend.runtime.block_allocator import BlockAllocator
from attnbackend.runtime.engine import Engine
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.input_batch import InputBatch
from attnbackend.runtime.model_runner_protocol import ModelRunner
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request import RequestOutput, StepOutput
from attnbackend.runtime.sampling_params import SamplingParams
from attnbackend.runtime.scheduler import Scheduler

__all__ = [
    "BlockAllocator",
    "Engine",
    "EngineCore",
    "InputBatch",
    "ModelRunner",
    "PreparedBatch",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "StepOutput",
]
