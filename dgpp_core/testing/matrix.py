"""The exactness matrix: however a reply is computed, it is the same reply.

The oracle is each prompt alone, cold, on one rank, in one prefill chunk, without drafts. Against it stand all
combinations of greedy and seeded picks, company, prefix cache, chunk size, drafting, pipelining and ranks.

Ranks are the one axis where the same bits are not promised: W ranks add a row's products in W parts, and float32 rounds
the sum otherwise. What is promised is that the ranks agree among themselves, and `TensorParallelWorld` sees to it. The
replies are still expected to be the same tokens; where one is not, `Difference.gap` tells whether it was a near tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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
    ``evicting``: whether each cell is run once more in a pool that holds one request.
    """

    worlds: Sequence[int] = (1,)
    chunks: Sequence[int] = (16, 64, 0)
    depths: Sequence[int] = (0,)
    lags: Sequence[int] = (0,)
    company: Sequence[int] = COMPANY
    evicting: bool = True
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
    longest = max(map(len, prompts))
    oracle = _oracle(make(settings_for(axes, 0, 0, longest, prefix_cache_gib=0.0), 0, 1), prompts, axes.max_tokens)
    compared, differences, hits, evictions, accepted = 0, list[Difference](), 0, 0, 0
    for ranks, chunk, depth, lag in itertools.product(axes.worlds, axes.chunks, axes.depths, axes.lags):
        for evicting in (False, True)[: 1 + axes.evicting]:
            room = {"kv_capacity": _one_request(axes, depth, longest)} if evicting else {}
            world = make(settings_for(axes, chunk, depth, longest, **room), lag, ranks)
            for case, number, seeded, reply in _cell(world, prompts, axes, evicting):
                compared += 1
                name = f"{ranks} ranks, chunk {chunk}, depth {depth}, lag {lag}, {case}"
                differences += _difference(name, reply, oracle[number, seeded])
            stats = world.scheduler.stats()
            hits, evictions = hits + stats.cache_hits, evictions + stats.cache_evictions
            accepted += stats.draft_accepted
    smallest = min(gap for expected in oracle.values() for gap in expected.gaps)
    return MatrixReport(compared, differences, hits, evictions, accepted, smallest)


def _oracle(world: World, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[tuple[int, bool], _Expected]:
    """By prompt number and whether seeded; log-probabilities differ by what the logits do."""
    oracle = {}
    for number, prompt in enumerate(prompts):
        greedy = world.reply(prompt, max_tokens, params=GREEDY, logprobs=2)
        gaps = [each.top[0][1] - each.top[1][1] for each in greedy.logprobs]
        oracle[number, False] = _Expected(greedy.tokens, gaps)
        oracle[number, True] = _Expected(world.reply(prompt, max_tokens, params=SEEDED).tokens, [])
    return oracle


def _one_request(axes: Axes, depth: int, longest: int) -> int:
    rows = longest + axes.max_tokens + 3 * (depth + 1)
    return (-(-rows // axes.block_tokens) + 1) * axes.block_tokens


def _cell(
    world: World, prompts: Sequence[Sequence[int]], axes: Axes, evicting: bool
) -> Iterator[tuple[str, int, bool, Reply]]:
    """Case, prompt number, whether seeded, and the reply."""
    if evicting:
        # A pool for one request: every long prompt evicts the one before, and comes back to be computed again.
        longest = sorted(enumerate(prompts), key=lambda item: -len(item[1]))[:3]
        for turn, (number, prompt) in itertools.product(range(2), longest):
            reply = world.reply(prompt, axes.max_tokens)
            yield f"evicted and recomputed, turn {turn}, prompt {number}", number, False, reply
        return
    for seeded, others in itertools.product((False, True), axes.company):
        params = SEEDED if seeded else GREEDY
        for state in ("cold", "hit"):
            batch = {
                number: world.submit(prompts[number], axes.max_tokens, params=params, use_cache=state == "hit")
                for number in range(others + 1)
            }
            replies = world.run()
            for number, request in batch.items():
                yield f"seeded {seeded}, with {others}, {state}, prompt {number}", number, seeded, replies[request]


def _difference(case: str, reply: Reply, expected: _Expected) -> list[Difference]:
    if reply.tokens == expected.tokens:
        return []
    pairs = enumerate(itertools.zip_longest(reply.tokens, expected.tokens))
    step = next(i for i, (found, wanted) in pairs if found != wanted)
    gap = expected.gaps[step] if step < len(expected.gaps) else math.nan
    return [Difference(case, step, reply.tokens, expected.tokens, gap)]
