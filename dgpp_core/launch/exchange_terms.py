"""What an exchange among nodes is asked, what it answers, and what is to be expected of it. Needs no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

SIZES = (8 << 10, 48 << 10, 160 << 10, 1 << 20)
"""Bytes: a token's hidden state in bfloat16 for one, several and many streams, and a piece of a prompt."""

Transport = Literal["gloo", "verbs"]


class ExchangeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of it; ``rendezvous`` is ``host:port`` on rank 0's host."""

    rank: int
    world: int
    rendezvous: str
    transport: Transport
    devices: tuple[str, ...] = ()
    gid_indices: tuple[int, ...] = ()


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce of so many bytes; microseconds."""

    bytes: int
    median: float
    worst: float


def expected_us(size: int, world: int, gbps: float, transport: Transport) -> float:
    """Microseconds beyond which an all-reduce of ``size`` bytes is worth a look.

    Twice the time that the link needs for the parts of all others, and an allowance for everything else: RDMA goes
    through two network cards and a polling host, TCP through two kernels and the agreement that precedes each sum.
    """
    allowance = 100.0 if transport == "verbs" else 1500.0
    return allowance + 2 * (world - 1) * size * 8 / (max(gbps, 1.0) * 1e3)
