"""Passes over FX graphs that hold attnbackend's ops."""

from __future__ import annotations

from attnbackend.fx_passes.base import Change, GraphPass, PassReport
from attnbackend.fx_passes.graph_text import graph_text
from attnbackend.fx_passes.merge_linears import MergeLinears
from attnbackend.fx_passes.pass_manager import PassManager
from attnbackend.fx_passes.select_backend import SelectBackend

__all__ = [
    "Change",
    "GraphPass",
    "MergeLinears",
    "PassManager",
    "PassReport",
    "SelectBackend",
    "graph_text",
]
