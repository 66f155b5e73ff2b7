"""Modules for people who write models."""

from __future__ import annotations

from attnbackend.layers.attention import Attention
from attnbackend.layers.cpu_linear import CPULinear, give_back_linears, take_linears
from attnbackend.layers.encoder import CrossAttention, CrossTensors, EncoderAttention, EncoderTensors
from attnbackend.layers.merged_linears import merge_linears
from attnbackend.layers.mla_attention import MLAAttention
from attnbackend.layers.paged import BatchTensors, BoundLayer, DecodeTensors, write_and_attend
from attnbackend.layers.rotary import rotate
from attnbackend.layers.sharing import bind_layers

__all__ = [
    "Attention",
    "BatchTensors",
    "BoundLayer",
    "CPULinear",
    "CrossAttention",
    "CrossTensors",
    "DecodeTensors",
    "EncoderAttention",
    "EncoderTensors",
    "MLAAttention",
    "bind_layers",
    "give_back_linears",
    "merge_linears",
    "rotate",
    "take_linears",
    "write_and_attend",
]
