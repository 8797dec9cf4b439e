"""Stopping a world: rank 0 in order, the others by its end, and whoever is left by force."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from dgpp_core.api.errors import LaunchError
from dgpp_core.launch.agent import processes
from dgpp_core.launch.look import Condition, conditions, nodes_of
from dgpp_core.launch.nodes import Node, call, each
from dgpp_core.launch.outside import Outside
from dgpp_core.launch.world import Member, World

DRAIN_S = 60.0
"""For requests that run, and for ranks to compare what they did; after it rank 0 is killed."""
FOLLOW_S = 15.0
"""For the other ranks once rank 0 is gone."""
ORPHANS_S = 2.0
"""For what a rank has started that is gone itself."""
KILLED_S = 10.0
POLL_S = 0.3

Pair = tuple[Node, Member]


def stop(world: World, outside: Outside, drain: float = DRAIN_S) -> None:
    """Stop every rank of a world; done at once where none runs.

    Args:
        drain: seconds that rank 0 may take.

    Raises:
        LaunchError: a rank is still alive, or its node does not answer, so that it may be.
    """
    pairs = list(zip(nodes_of(world, outside), world.members, strict=True))
    found = _look(pairs)
    if found[0].alive:
        outside.say(f"{world.members[0]}: asked to end (process {found[0].pid})")
        _end(pairs[:1], outside, drain if found[0].there else ORPHANS_S)
    rest = [pair for pair, seen in zip(pairs[1:], found[1:], strict=True) if seen.alive]
    if rest:
        _end(rest, outside, FOLLOW_S if any(seen.there for seen in found[1:]) else ORPHANS_S)
    _confirm(pairs, _look(pairs), outside.say)


def _end(pairs: Sequence[Pair], outside: Outside, seconds: float) -> None:
    """Ask ranks to end, and kill those that are there after ``seconds``."""
    each(pairs, lambda pair: call(pair[0], processes.ask, pair[1].folder, pair[1].record))
    left = _wait(pairs, outside, seconds)
    for _, member in left:
        outside.say(f"{member}: did not end, and is killed")
    each(left, lambda pair: call(pair[0], processes.tell, pair[1].folder, pair[1].record, int(signal.SIGKILL), True))
    _wait(left, outside, KILLED_S)


def _look(pairs: Sequence[Pair]) -> list[Condition]:
    return conditions([node for node, _ in pairs], [member for _, member in pairs])


def _confirm(pairs: Sequence[Pair], found: Sequence[Condition], say: Callable[[str], None]) -> None:
    faults = []
    for (node, member), seen in zip(pairs, found, strict=True):
        if seen.alive:
            faults.append(f"{member}: process {seen.pid or seen.others} is alive")
        elif seen.state == "unknown":
            faults.append(f"{member}: {seen.problem}")
        elif seen.state == "gone":
            call(node, processes.forget, member.folder, member.record)
            say(f"{member}: gone")
    if faults:
        raise LaunchError(
            "not every rank is known to have ended", found="; ".join(faults), expected="all gone",
            hint="see to the node, then run `dgpp cluster down` again",
        )  # fmt: skip


def _wait(pairs: Sequence[Pair], outside: Outside, seconds: float) -> list[Pair]:
    """Those that are alive still; returns once none is, or after ``seconds``."""
    end, left = outside.clock() + seconds, list(pairs)
    while left:
        left = [pair for pair, seen in zip(left, _look(left), strict=True) if seen.alive]
        if outside.clock() > end:
            break
        if left:
            outside.sleep(POLL_S)
    return left
