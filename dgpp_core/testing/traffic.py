"""What a decode step reads of the weights, counted from the products and the routing that happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import msgspec
import torch

from dgpp_core.ops.experts import Experts
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.mlp import GateUp
from dgpp_core.ops.router import Router
from dgpp_core.testing.inspect import resident_tensor_bytes

_METHODS: tuple[tuple[type, str], ...] = (
    (Linear, "__call__"), (Linear, "wide"), (Linear, "partials"), (GateUp, "__call__"), (Router, "__call__"),
    (Experts, "__call__"),
)  # fmt: skip


class Read(msgspec.Struct, frozen=True, eq=False):
    """One call of an operation that has weights; of experts, those that rows were sent to."""

    operation: object
    chosen: frozenset[int] = frozenset()


@contextmanager
def recorded_reads() -> Iterator[list[Read]]:
    """Note the operations with weights that run while it lasts, in this process; an operation's own parts do not count.

    It makes the host wait for the routing.
    """
    reads: list[Read] = []
    inside = False

    def recording(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return plain(self, *args, **kwargs)
            chosen = frozenset(torch.unique(args[1].ids).tolist()) if isinstance(self, Experts) else frozenset()
            reads.append(Read(self, chosen))
            inside = True
            try:
                return plain(self, *args, **kwargs)
            finally:
                inside = False

        return call

    kept = [(kind, name, vars(kind)[name]) for kind, name in _METHODS if name in vars(kind)]
    for kind, name, plain in kept:
        setattr(kind, name, recording(plain))
    try:
        yield reads
    finally:
        for kind, name, plain in kept:
            setattr(kind, name, plain)


def read_bytes(reads: list[Read]) -> int:
    """Bytes of weights that these calls must read: a matrix at each call, of experts each one chosen and the shared.

    Vectors and rows of an embedding are left out.
    """
    held: dict[int, int] = {}
    total = 0
    for read in reads:
        size = held.setdefault(id(read.operation), resident_tensor_bytes(read.operation))
        if isinstance(read.operation, Experts):
            entries = read.operation.experts + read.operation.shared
            size = size * (len(read.chosen) + read.operation.shared) // entries
        total += size
    return total


def mean_chosen(reads: list[Read]) -> float:
    """Routed experts that a call was sent to, on average; 0 without any."""
    counts = [len(read.chosen) for read in reads if isinstance(read.operation, Experts)]
    return sum(counts) / len(counts) if counts else 0.0
