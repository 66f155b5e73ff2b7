"""Load on an engine as users make it: traces of requests, their times, a report and a picture.

Needs the extra ``serve`` (numpy); the picture needs matplotlib.
"""

from __future__ import annotations

from attnbackend.bench.load import RequestTimes, ServeRun, run_trace
from attnbackend.bench.report import ServeReport
from attnbackend.bench.traces import Lengths, TraceRequest, read_trace, synthetic_trace

__all__ = [
    "Lengths",
    "RequestTimes",
    "ServeReport",
    "ServeRun",
    "TraceRequest",
    "read_trace",
    "run_trace",
    "synthetic_trace",
]
