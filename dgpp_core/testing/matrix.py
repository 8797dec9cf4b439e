"""The exactness matrix: however a reply is computed, it is the same reply.

The oracle is each prompt alone, cold, on one rank, in one prefill chunk, without drafts. Against it stand all
combinations of greedy and seeded picks, company, prefix cache, chunk size, drafting, pipelining and ranks; or, where
that takes too long, so many of them that each value of an axis still meets each value of another.

Ranks are the one axis where the same bits are not promised: W ranks add a row's products in W parts, and float32 rounds
the sum otherwise. What is promised is that the ranks agree among themselves, and `TensorParallelWorld` sees to it. The
replies are still expected to be the same tokens; where one is not, `Difference.gap` tells whether it was a near tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dgpp_core.config.settings import EngineSettings
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import Reply, World

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=20_26)
COMPANY = (0, 1, 3, 7)


class MakeWorld(Protocol):
    """Makes a fresh world of the model under test, with ``ranks`` ranks."""

    def __call__(self, settings: EngineSettings, lag: int, ranks: int, /) -> World:
        """With these settings, and results ``lag`` ticks late."""
        ...


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """What is varied.

    ``worlds``: ranks; ``chunks``: prefill budgets, 0 is the whole prompt; ``depths``: draft depth, 0 is off;
    ``evicting``: whether cells are run once more in a pool that holds one request.

    ``thin``: all combinations of chunks, depths, lags and ranks are run. Where there are several chunks and depths each
    meets half of the company, and every second or third is evicting. Prompts are greedy when cold and seeded when found
    in the cache, or the other way round.
    """

    worlds: Sequence[int] = (1,)
    chunks: Sequence[int] = (16, 64, 0)
    depths: Sequence[int] = (0,)
    lags: Sequence[int] = (0,)
    company: Sequence[int] = COMPANY
    evicting: bool = True
    thin: bool = False
    max_tokens: int = 24
    block_tokens: int = 16


class Difference(msgspec.Struct, frozen=True):
    """A reply that came out otherwise: how it was computed, and the first step that differs.

    ``gap`` is that between the oracle's two largest logits at that step; NaN for a seeded reply, whose pick depends on
    more than those.
    """

    case: str
    step: int
    found: Sequence[int]
    expected: Sequence[int]
    gap: float = math.nan


class MatrixReport(msgspec.Struct, frozen=True):
    """The outcome: replies compared, and counters that show that the cases took place.

    ``smallest_gap`` is the nearest that any greedy pick of the oracle came to a tie, as a difference of logits.
    """

    compared: int
    differences: Sequence[Difference]
    hits: int
    evictions: int
    accepted: int
    smallest_gap: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One world and what it is given; attributes as in `Axes`.

    Attributes:
        swapped: of both, whether seeded are the prompts of odd number (False) or those of even number, by whether
            prompts are to be found in the cache.
    """

    ranks: int
    chunk: int
    depth: int
    lag: int
    company: Sequence[int]
    swapped: Mapping[bool, Sequence[bool]]
    evicting: bool

    @property
    def name(self) -> str:
        """For whoever reads a `Difference`."""
        return f"{self.ranks} ranks, chunk {self.chunk}, depth {self.depth}, lag {self.lag}"


def cells_of(axes: Axes) -> Iterator[Cell]:
    """What a matrix runs, in order."""
    both: tuple[bool, ...] = (False, True)
    numbered = [list(enumerate(values)) for values in (axes.worlds, axes.chunks, axes.depths, axes.lags)]
    fewer = min(len(axes.chunks), len(axes.depths))
    for (w, ranks), (c, chunk), (d, depth), (g, lag) in itertools.product(*numbered):
        number, company, swapped, evicting = w + c - d + g, axes.company, {False: both, True: both}, axes.evicting
        if axes.thin:
            step = min(2, fewer, len(axes.company))
            company, evicting = axes.company[number % step :: step], evicting and number % min(3, fewer) == 0
            swapped = {False: (False,), True: (True,)}
        yield Cell(
            ranks=ranks, chunk=chunk, depth=depth, lag=lag, company=company, swapped=swapped, evicting=evicting
        )  # fmt: skip


class _Expected(msgspec.Struct, frozen=True):
    tokens: list[int]
    gaps: list[float]


def settings_for(axes: Axes, chunk: int, depth: int, longest: int, **changes: Any) -> EngineSettings:
    """Engine settings of one cell; the pool holds eight requests of the longest prompt."""
    rows = longest + axes.max_tokens + 3 * (depth + 1)
    blocks = -(-rows // axes.block_tokens) * (max(axes.company) + 1)
    values: dict[str, Any] = {
        "max_concurrency": max(axes.company) + 1, "block_tokens": axes.block_tokens,
        "kv_capacity": blocks * axes.block_tokens, "prefill_budget_tokens": chunk, "mtp": depth > 0,
        "mtp_depth": max(1, depth), "prefix_cache_gib": 0.02, "prefix_min_tokens": 0,
    }  # fmt: skip
    return EngineSettings(**(values | changes))


def exactness_matrix(make: MakeWorld, prompts: Sequence[Sequence[int]], axes: Axes) -> MatrixReport:
    """Run every cell.

    Args:
        make: builds a world of the model under test.
        prompts: at least ``max(axes.company) + 1``, of different lengths.
    """
    used = {number: prompts[number] for number in range(max(axes.company) + 1)}
    if axes.evicting:
        used |= dict(sorted(enumerate(prompts), key=lambda item: -len(item[1]))[:3])
    longest = max(map(len, used.values()))
    oracle = _oracle(make(settings_for(axes, 0, 0, longest, prefix_cache_gib=0.0), 0, 1), used, axes.max_tokens)
    compared, differences, hits, evictions, accepted = 0, list[Difference](), 0, 0, 0
    for cell in cells_of(axes):
        for evicting in (False, True)[: 1 + cell.evicting]:
            room = {"kv_capacity": _one_request(axes, cell.depth, longest)} if evicting else {}
            world = make(settings_for(axes, cell.chunk, cell.depth, longest, **room), cell.lag, cell.ranks)
            run = _evicted(world, used, axes) if evicting else _in_company(world, used, axes, cell)
            for case, number, seeded, reply in run:
                compared += 1
                differences += _difference(f"{cell.name}, {case}", reply, oracle[number, seeded])
            stats = world.scheduler.stats()
            hits, evictions = hits + stats.cache_hits, evictions + stats.cache_evictions
            accepted += stats.draft_accepted
    smallest = min(gap for expected in oracle.values() for gap in expected.gaps)
    return MatrixReport(compared, differences, hits, evictions, accepted, smallest)


def _oracle(world: World, prompts: Mapping[int, Sequence[int]], max_tokens: int) -> dict[tuple[int, bool], _Expected]:
    """By prompt number and whether seeded; log-probabilities differ by what the logits do."""
    oracle = {}
    for number, prompt in prompts.items():
        greedy = world.reply(prompt, max_tokens, params=GREEDY, logprobs=2)
        gaps = [each.top[0][1] - each.top[1][1] for each in greedy.logprobs]
        oracle[number, False] = _Expected(greedy.tokens, gaps)
        oracle[number, True] = _Expected(world.reply(prompt, max_tokens, params=SEEDED).tokens, [])
    return oracle


def _one_request(axes: Axes, depth: int, longest: int) -> int:
    rows = longest + axes.max_tokens + 3 * (depth + 1)
    return (-(-rows // axes.block_tokens) + 1) * axes.block_tokens


_Case = tuple[str, int, bool, Reply]
"""Its name, the prompt's number, whether it is seeded, and the reply."""


def _evicted(world: World, prompts: Mapping[int, Sequence[int]], axes: Axes) -> Iterator[_Case]:
    """In a pool for one request every long prompt evicts the one before, and comes back to be computed again."""
    longest = sorted(prompts.items(), key=lambda item: -len(item[1]))[:3]
    for turn, (number, prompt) in itertools.product(range(2), longest):
        reply = world.reply(prompt, axes.max_tokens)
        yield f"evicted and recomputed, turn {turn}, prompt {number}", number, False, reply


def _in_company(world: World, prompts: Mapping[int, Sequence[int]], axes: Axes, cell: Cell) -> Iterator[_Case]:
    """Greedy and seeded requests side by side, cold and then with the cache."""
    for others, hit in itertools.product(cell.company, (False, True)):
        for swapped in cell.swapped[hit]:
            batch = {}
            for number in range(others + 1):
                seeded = (number % 2 == 1) != swapped
                params = SEEDED if seeded else GREEDY
                request = world.submit(prompts[number], axes.max_tokens, params=params, use_cache=hit)
                batch[request] = number, seeded
            replies, state = world.run(), "hit" if hit else "cold"
            for request, (number, seeded) in batch.items():
                case = f"seeded {seeded}, with {others}, {state}, prompt {number}"
                yield case, number, seeded, replies[request]


def _difference(case: str, reply: Reply, expected: _Expected) -> list[Difference]:
    if reply.tokens == expected.tokens:
        return []
    pairs = enumerate(itertools.zip_longest(reply.tokens, expected.tokens))
    step = next(i for i, (found, wanted) in pairs if found != wanted)
    gap = expected.gaps[step] if step < len(expected.gaps) else math.nan
    return [Difference(case, step, reply.tokens, expected.tokens, gap)]
