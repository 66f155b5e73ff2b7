"""Passes over FX graphs that hold attnbackend's ops."""

from __future__ import annotations

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassConfig, PassReport, Stage
from attnbackend.fx_passes.cache_order import CacheOrderError
from attnbackend.fx_passes.choices import BackendPriorities, Measured, MeasuredTable, Site
from attnbackend.fx_passes.dumps import diff_html
from attnbackend.fx_passes.fuse_latent_rope import FuseLatentRopeCacheWrite
from attnbackend.fx_passes.fuse_output_quantization import FuseOutputQuantization
from attnbackend.fx_passes.fuse_rope import FuseRopeCacheWrite
from attnbackend.fx_passes.graph_text import graph_text
from attnbackend.fx_passes.join_cpu_linears import JoinCPULinears
from attnbackend.fx_passes.merge_linears import MergeLinears
from attnbackend.fx_passes.pass_manager import PassManager
from attnbackend.fx_passes.pick_rows_early import PickRowsEarly
from attnbackend.fx_passes.plugins import installed_passes
from attnbackend.fx_passes.quantize_queries import QuantizeQueries
from attnbackend.fx_passes.recognise_attention import PagedState, RecogniseAttention
from attnbackend.fx_passes.remove_no_ops import RemoveNoOps
from attnbackend.fx_passes.retarget import retarget
from attnbackend.fx_passes.select_backend import SelectBackend
from attnbackend.fx_passes.shape_range import ShapeRange
from attnbackend.fx_passes.undo_functionalization import UndoFunctionalization

__all__ = [
    "BackendPriorities",
    "CacheOrderError",
    "Change",
    "FuseLatentRopeCacheWrite",
    "FuseOutputQuantization",
    "FuseRopeCacheWrite",
    "GraphPass",
    "JoinCPULinears",
    "Measured",
    "MeasuredTable",
    "MergeLinears",
    "NearMiss",
    "PagedState",
    "PassConfig",
    "PassManager",
    "PassReport",
    "PickRowsEarly",
    "QuantizeQueries",
    "RecogniseAttention",
    "RemoveNoOps",
    "SelectBackend",
    "ShapeRange",
    "Site",
    "Stage",
    "UndoFunctionalization",
    "diff_html",
    "graph_text",
    "installed_passes",
    "retarget",
]
