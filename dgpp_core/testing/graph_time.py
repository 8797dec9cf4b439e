"""The time of a launch on a GPU, its own start and end inside."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def timed(launch: Callable[[int], Any], launches: int, replays: int = 7) -> float:
    """Median microseconds of one of ``launches`` in a graph."""
    for i in range(2):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    graph.replay()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / launches)
    return float(statistics.median(spans))
