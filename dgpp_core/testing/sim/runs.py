"""Many seeds, one after the other, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from dgpp_core.testing.sim.scenario import draw
from dgpp_core.testing.sim.world import Run, SimWorld


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A seed with which something does not hold.

    Attributes:
        replay: the command that shows it again.
    """

    seed: int
    what: str
    replay: str


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What many seeds came to.

    Attributes:
        steps, answered, preempted, hits, evicted: sums over rank 0 of all runs.
        virtual_s: seconds that all worlds ran for.
        troubles: by kind, how many runs had it, and in how many it ended the world.
        found_s: the longest that clients waited to be told of a fault while the world served.
    """

    seeds: int
    steps: int
    answered: int
    preempted: int
    hits: int
    evicted: int
    virtual_s: float
    troubles: dict[str, tuple[int, int]]
    found_s: float
    violations: tuple[Violation, ...]


def replay(seed: int, world: int | None = None) -> str:
    """The command that runs one seed again."""
    return f"dgpp simulate --seed {seed}" + ("" if world is None else f" --world {world}")


def play(seed: int, world: int | None = None) -> Run | Violation:
    """One seed to its end. Whatever is raised is a violation: worlds are to end by themselves.

    Args:
        world: ranks, instead of the seed's.
    """
    try:
        return SimWorld(draw(seed, world)).run()
    except Exception as error:
        return Violation(seed=seed, what=f"{type(error).__name__}: {error}", replay=replay(seed, world))


def simulate(
    seeds: Iterable[int], world: int | None = None, report: Callable[[Run | Violation], None] = lambda run: None
) -> Tally:
    """Play all of ``seeds``; ``report`` is called after each."""
    sums: Counter[str] = Counter()
    had: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    found_s = virtual_s = 0.0
    violations = []
    for seed in seeds:
        run = play(seed, world)
        report(run)
        sums["seeds"] += 1
        if isinstance(run, Violation):
            violations.append(run)
            continue
        for name in ("steps", "answered", "preempted", "hits", "evicted"):
            sums[name] += getattr(run, name)
        virtual_s += run.virtual_s
        had.update(run.troubles)
        if run.failure:
            ended.update(run.troubles)
            found_s = max(found_s, run.found_s)
    return Tally(
        **{name: sums[name] for name in ("seeds", "steps", "answered", "preempted", "hits", "evicted")},
        virtual_s=round(virtual_s, 1),
        troubles={kind: (had[kind], ended[kind]) for kind in sorted(had)},
        found_s=round(found_s, 3),
        violations=tuple(violations),
    )
