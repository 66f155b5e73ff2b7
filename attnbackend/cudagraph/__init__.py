"""CUDA graphs in serving: which mode can run, for which sizes, capture, replay, and what keeps it right."""

from __future__ import annotations

from attnbackend.cudagraph.capture_report import CaptureCost, CaptureReport
from attnbackend.cudagraph.dispatcher import BatchDescriptor, BatchShape, CUDAGraphDispatcher, Dispatch
from attnbackend.cudagraph.graphed_steps import GraphedSteps, PreparedStep
from attnbackend.cudagraph.graphs import CUDAGraphs, GraphLibrary, RecordedGraphs
from attnbackend.cudagraph.modes import (
    CUDAGraphMode,
    GraphSupport,
    ResolvedMode,
    lowest_support,
    resolve_cudagraph_mode,
)
from attnbackend.cudagraph.safety import LongLivedTensors, module_tensors, plan_tensors
from attnbackend.cudagraph.sizes import capture_sizes, decode_sizes, mixed_sizes, uncovered_decodes

__all__ = [
    "BatchDescriptor",
    "BatchShape",
    "CUDAGraphDispatcher",
    "CUDAGraphMode",
    "CUDAGraphs",
    "CaptureCost",
    "CaptureReport",
    "Dispatch",
    "GraphLibrary",
    "GraphSupport",
    "GraphedSteps",
    "LongLivedTensors",
    "PreparedStep",
    "RecordedGraphs",
    "ResolvedMode",
    "capture_sizes",
    "decode_sizes",
    "lowest_support",
    "mixed_sizes",
    "module_tensors",
    "plan_tensors",
    "resolve_cudagraph_mode",
    "uncovered_decodes",
]
