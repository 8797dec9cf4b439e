"""What must hold, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Container

from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Stats
from dgpp_core.testing.fake_engine import FakeEngine


class BrokenPromiseError(AssertionError):
    """Something that must hold does not."""


def require(holds: bool, promise: str) -> None:
    """Raise `BrokenPromiseError` where ``promise`` does not hold."""
    if not holds:
        raise BrokenPromiseError(promise)


def audit(who: str, limits: Limits, stats: Stats, engine: FakeEngine, ended: Container[int]) -> None:
    """After a step of one rank: its pools add up, and belong to those that run.

    Args:
        ended: requests that have.
    """
    held = engine.slots_held
    pools = len(engine.blocks_held) + stats.blocks_cached == stats.blocks_in_use <= stats.blocks_total
    require(pools, f"{who}: every block is accounted for")
    require(stats.active + stats.prefilling == len(held), f"{who}: the slots held are those of running requests")
    require(not any(name in ended for name in held.values()), f"{who}: no slot is held by a request that ended")
    require(len(set(held.values())) == len(held), f"{who}: no request holds two slots")
    require(stats.queued + len(held) <= limits.slots + limits.queue, f"{who}: the queue is bounded")
    require(0 <= stats.snapshots_in_use <= stats.snapshots_total, f"{who}: the arena is bounded")


def audit_end(who: str, stats: Stats, engine: FakeEngine) -> None:
    """When nothing runs any more: only the prefix cache holds anything."""
    require(stats.blocks_in_use == stats.blocks_cached, f"{who}: only the prefix cache holds blocks at the end")
    require(not engine.slots_held, f"{who}: no slot is held at the end")
