"""What a seed decides: the sizes, what clients ask for and when, and what goes wrong."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar

VOCAB = 7
LATEST_S = 0.9
"""Trouble begins within so many seconds: most worlds serve by then, and few are through."""

Kind = Literal[
    "delay", "pause", "leap", "freeze", "old epoch", "second of a rank", "slow step",
    "flip", "drop", "double", "swap", "cut", "crash", "stop", "hang", "raise", "result", "snapshot", "build", "terms",
]  # fmt: skip
"""What may go wrong. The first seven are borne: replies come late at most. Each of the others, once it has changed
something, ends the world by the name of its rank."""
BORNE: frozenset[Kind] = frozenset({"delay", "pause", "leap", "freeze", "old epoch", "second of a rank", "slow step"})
AT_THE_START: frozenset[Kind] = frozenset({"build", "terms"})
ON_A_LINK: tuple[Kind, ...] = ("flip", "drop", "double", "swap", "cut")
IN_A_RANK: tuple[Kind, ...] = ("crash", "stop", "hang", "raise", "result", "snapshot", "build", "terms")


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong.

    Attributes:
        rank: where, or at the far end of which link.
        at: seconds after the start.
        amount: seconds of it, or how many picks, snapshots or operations later it strikes.
        outward: on the way from rank 0.
    """

    kind: Kind
    rank: int
    at: float
    amount: float = 0.0
    outward: bool = True


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        at: seconds after the service is ready.
        cancel: seconds after which the client leaves; negative for never.
        stop: tokens after which a stop string matches; negative for never.
        follows: the request whose reply its prompt goes on from, once that has ended; negative for none.
    """

    at: float
    submit: Submit
    cancel: float = -1.0
    stop: int = -1
    follows: int = -1


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run but the chances of threads and wires, which come from the seed too.

    Attributes:
        latency: seconds that a frame takes, at least.
        compute_ms: milliseconds of a step.
        seen: whether the host is in collectives itself, as on a CPU; otherwise it waits for its device.
        notices: whether the bus tells ranks in a collective that another one has gone.
        shutdown: seconds after ready at which the service is told to stop, whatever runs; negative for at the end.
    """

    seed: int
    world: int
    limits: Limits
    lag: int
    asks: tuple[Ask, ...]
    troubles: tuple[Trouble, ...]
    latency: float
    compute_ms: float
    seen: bool
    notices: bool
    shutdown: float = -1.0


def draw(seed: int, world: int | None = None) -> Scenario:
    """The scenario of a seed, with ``world`` ranks if that is said."""
    source = random.Random(seed)
    drawn = source.choice([1, 2, 2, 2, 3, 3, 4])
    ranks = drawn if world is None else world
    limits = _limits(source)
    return Scenario(
        seed=seed,
        world=ranks,
        limits=limits,
        lag=source.randint(0, 1),
        asks=_asks(source),
        troubles=_troubles(source, ranks, limits),
        latency=source.choice([0.0002, 0.001, 0.02]),
        compute_ms=source.choice([1.0, 8.0, 25.0]),
        seen=source.random() < 0.7,
        notices=source.random() < 0.6,
        shutdown=source.uniform(0, 0.6) if source.random() < 0.1 else -1.0,
    )


def _limits(source: random.Random) -> Limits:
    """Pools small enough that requests wait, grow and lose their slots."""
    snapshots = source.choice([None, None, 0, 3, 8, 24, 24])
    depth = source.choice([0, 0, 1, 2, 3])
    return Limits(
        slots=source.choice([1, 2, 3, 4, 5]),
        blocks=source.randint(9, 30),
        block_tokens=source.choice([2, 4]),
        snapshots=snapshots or 0,
        needs_snapshot=snapshots is not None,
        queue=source.choice([1, 4, 64]),
        admission=source.choice(["full", "grow", "grow"]),
        admission_window=source.choice([0, 1, 4, 8]),
        prefill_budget=source.choice([0, 1, 3, 8]),
        prefill_idle_budget=source.choice([0, 5, 20]),
        depth=depth,
        ladder=tuple(range(depth + 1)) if depth and source.random() < 0.4 else (),
        max_context=source.choice([24, 48]),
        prefix_cache=source.random() < 0.85,
        prefill_tail=source.choice([0, 0, 0, 3]),
        confident=source.random() < 0.5,
        snapshot_least=source.choice([0, 0, 6]),
        snapshot_heads=source.random() < 0.5,
        decode_rows_match_prefill=source.random() < 0.8,
    )


def _asks(source: random.Random) -> tuple[Ask, ...]:
    stem = [source.randrange(VOCAB) for _ in range(12)]
    pace, hurry = source.choice([0.0, 0.0, 0.02, 0.12]), source.choice([0.0, 0.0, 0.3])
    asks: list[Ask] = []
    at = 0.0
    for name in range(source.randint(1, 11)):
        at += source.expovariate(1 / pace) if pace else 0.0
        follows = source.randrange(name) if name and source.random() < 0.4 else -1
        asks.append(Ask(
            at=at,
            submit=_submit(source, name, stem),
            cancel=source.uniform(0, 0.3) if source.random() < hurry else -1.0,
            stop=source.randint(1, 6) if source.random() < hurry else -1,
            follows=follows,
        ))  # fmt: skip
    return tuple(asks)


def _submit(source: random.Random, name: int, stem: list[int]) -> Submit:
    rest = source.randint(0, 8) if source.random() < 0.95 else 40
    tokens = stem[: source.choice([0, 0, 4, 8, 12])] + [source.randrange(VOCAB) for _ in range(rest)]
    grammar = Grammar(source=sources.regex(f"{name}*"), ends=(0,)) if source.random() < 0.1 else None
    return Submit(
        id=name,
        tokens=tuple(tokens),
        max_tokens=source.randint(1, 18),
        params=GREEDY,
        eos_ids=(0,) if source.random() < 0.3 else (),
        use_cache=source.random() < 0.9,
        turns=tuple(sorted(source.sample(range(1, len(tokens) + 1), k=min(len(tokens), source.randint(0, 2))))),
        grammar=grammar,
    )


def _troubles(source: random.Random, world: int, limits: Limits) -> tuple[Trouble, ...]:
    """None, up to three that are borne, or one that is not."""
    at, rank = source.uniform(0, LATEST_S), source.randrange(world)
    dice = source.random()
    if dice < 0.25:
        return ()
    if dice < 0.5:
        return _borne(source, world)
    if world == 1:
        kind: Kind = source.choice(["crash", "stop", "raise"])
        return (Trouble(kind=kind, rank=0, at=at, amount=source.randrange(30)),)
    if dice < 0.7:
        link, outward = source.randrange(1, world), source.random() < 0.5
        return (Trouble(kind=source.choice(ON_A_LINK), rank=link, at=at, outward=outward),)
    kind = source.choice([kind for kind in IN_A_RANK if kind != "snapshot" or limits.snapshots])
    if kind in AT_THE_START or kind in ("result", "snapshot"):
        rank = source.randrange(1, world)
    amount = source.randrange(3 if kind == "snapshot" else 30)
    return (Trouble(kind=kind, rank=rank, at=0.0 if kind == "snapshot" else at, amount=amount),)


def _borne(source: random.Random, world: int) -> tuple[Trouble, ...]:
    """Each rank is late once at most, and rank 0 only alone: what they may be late in all is a matter of patience."""

    def late(rank: int) -> Trouble:
        kinds: tuple[Kind, ...] = ("delay", "pause", "leap", "slow step") if rank else ("pause", "leap", "slow step")
        kind = source.choice(kinds)
        most = 0.4 if kind == "leap" else 0.9
        return Trouble(kind=kind, rank=rank, at=source.uniform(0, LATEST_S), amount=source.uniform(0.1, most))

    dice = source.random()
    strangers: list[Kind] = ["old epoch", "second of a rank"]
    found = []
    if world > 1 and dice < 0.3:
        found = [
            Trouble(kind=source.choice(strangers), rank=source.randrange(1, world), at=source.uniform(0, LATEST_S))
        ]
    if dice < 0.15 or world == 1:
        found.append(late(0))
    elif dice < 0.5:
        found.append(Trouble(kind="freeze", rank=0, at=source.uniform(0, LATEST_S), amount=source.uniform(0.1, 40.0)))
    else:
        found += [late(rank) for rank in range(1, world) if source.random() < 0.6]
    return tuple(found)
