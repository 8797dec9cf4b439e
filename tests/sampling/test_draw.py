"""The draw against brute force, the filters' order, its exact distribution, and prefixes against the whole row."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgpp_core.sampling.draw import WIDTHS, draw
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.random import uniform

UNIT = 2**53
LAST = 1 - 2.0**-53


def logs(*chances: float) -> Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in chances])


def intervals(logits: Tensor, params: SamplingParams) -> list[tuple[int, int]]:
    """Every token that can be drawn and how many of the 2**53 values of u pick it, in the order of u."""
    found, start = [], 0
    while start < UNIT:
        token = draw(logits, params, start / UNIT).token
        low, high = start, UNIT
        while high - low > 1:
            middle = (low + high) // 2
            same = draw(logits, params, middle / UNIT).token == token
            low, high = (middle, high) if same else (low, middle)
        found.append((token, high - start))
        start = high
    return found


def random_row(rng: random.Random, vocab: int) -> list[float]:
    kind = rng.choice(["normal", "peaked", "ties", "flat", "holes"])
    spread = {"normal": 2.0, "peaked": 12.0, "ties": 1.5, "flat": 0.0, "holes": 3.0}[kind]
    row = [rng.gauss(0, spread) for _ in range(vocab)]
    if kind == "ties":
        row = [float(round(x)) for x in row]
    if kind == "holes":
        row = [x if rng.random() < 0.6 else -math.inf for x in row]
        row[rng.randrange(vocab)] = 0.25
    return [float(np.float32(x)) + 0.0 for x in row]


def random_filters(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.01, 0.3, 0.7, 1.0, 1.0, 1.7, 30.0]),
        top_k=rng.choice([0, 0, 1, 2, 3, 7, 50]),
        top_p=rng.choice([1.0, 1.0, 1e-6, rng.random() or 1.0, 0.95]),
        min_p=rng.choice([0.0, 0.0, rng.random(), 0.05, 1.0]),
    )


def test_random_rows_equal_brute_force(reference: Callable[..., Any]) -> None:
    rng, ambiguous, cases = random.Random(1), 0, 3000
    for case in range(cases):
        row, params = random_row(rng, rng.randint(1, 40)), random_filters(rng)
        u, wanted = rng.randrange(UNIT) / UNIT, rng.randint(-1, 8)
        expected = reference(row, params, u, alternatives=max(wanted, 0))
        if expected.margin < 1e-9:
            ambiguous += 1
            continue
        choice = draw(torch.tensor(row), params, u, wanted)
        assert choice.token == expected.token, (case, row, params, u)
        if wanted < 0:
            assert choice.logprobs is None
            continue
        assert choice.logprobs is not None
        assert choice.logprobs.logprob == pytest.approx(expected.logprob, abs=1e-7)
        assert [t for t, _ in choice.logprobs.top] == [t for t, _ in expected.top], (case, row, params)
        assert [p for _, p in choice.logprobs.top] == pytest.approx([p for _, p in expected.top], abs=1e-7)
    assert ambiguous < cases / 50


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.5, top_k=5),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.08),
        SamplingParams(temperature=1.3, top_k=9, min_p=0.02, top_p=0.8),
    ],
    ids=["plain", "cold", "top_k", "top_p", "min_p", "all"],
)
def test_share_of_every_token_is_exact(reference: Callable[..., Any], params: SamplingParams) -> None:
    """The 2**53 draws are shared out as the probabilities say, to 1e-12, and in canonical order."""
    rng = random.Random(11)
    for row in ([rng.gauss(0, 2) for _ in range(12)], [1.0, 3.0, 1.0, 3.0, -math.inf, 2.0, 1.0, 0.5, 0.5, 0.0]):
        logits = torch.tensor(row)
        expected = reference(logits.tolist(), params, 0.5)
        found = intervals(logits, params)
        assert [token for token, _ in found] == expected.survivors
        for token, share in found:
            assert share / UNIT == pytest.approx(expected.probabilities[token], abs=1e-12)


def test_frequencies_of_seeded_draws(reference: Callable[..., Any]) -> None:
    """Chi-square of 200,000 draws with the sampler's random numbers, along positions and along seeds."""
    logits, params = torch.tensor([0.3, 1.9, -1.0, 0.3, 2.2, 0.9]), SamplingParams(temperature=0.9, top_p=0.97)
    expected = reference(logits.tolist(), params, 0.5)
    shares = intervals(logits, params)
    bounds = np.cumsum([share for _, share in shares]) / UNIT
    draws = 100_000
    for numbers in ([uniform(5, p) for p in range(draws)], [uniform(s, 9) for s in range(draws)]):
        for u in numbers[:200]:
            assert draw(logits, params, u).token == shares[int(np.searchsorted(bounds, u, side="right"))][0]
        cells = np.bincount(np.searchsorted(bounds, numbers, side="right"), minlength=len(shares))
        chances = np.array([expected.probabilities[token] for token, _ in shares])
        statistic = float(((cells - draws * chances) ** 2 / (draws * chances)).sum())
        assert statistic < 30  # 4 degrees of freedom: chance 5e-6


def test_min_p_before_top_p() -> None:
    params = SamplingParams(min_p=0.4, top_p=0.75)
    # min-p leaves 0.4, 0.3, 0.2; of their 0.9 the first two are 0.78. The other way round all three would stay.
    assert [t for t, _ in intervals(logs(0.4, 0.3, 0.2, 0.1), params)] == [0, 1]


def test_top_k_before_top_p() -> None:
    row = logs(0.4, 0.3, 0.2, 0.1)
    # Top-k leaves 0.9, of which the first two are 0.78; of the whole row they are 0.7.
    assert [t for t, _ in intervals(row, SamplingParams(top_k=3, top_p=0.75))] == [0, 1]
    assert [t for t, _ in intervals(row, SamplingParams(top_p=0.75))] == [0, 1, 2]


def test_crossing_token_is_kept_and_no_more() -> None:
    row = torch.zeros(4)
    assert [t for t, _ in intervals(row, SamplingParams(top_p=0.5))] == [0, 1]
    assert [t for t, _ in intervals(row, SamplingParams(top_p=0.5 + 2**-53))] == [0, 1, 2]
    assert [t for t, _ in intervals(row, SamplingParams(top_p=1e-300))] == [0]


def test_min_p_of_one_keeps_the_ties_of_the_largest() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 1.999])
    assert intervals(row, SamplingParams(min_p=1.0)) == [(1, UNIT // 2), (2, UNIT // 2)]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-30, 1e-45, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    row = torch.tensor([1.0, 30.0, -math.inf, 29.99, -50.0, 30.0 - 2**-8])
    for u in (0.0, 0.3, LAST):
        choice = draw(row, SamplingParams(temperature=temperature), u, 3)
        assert choice.token == 1
        assert choice.logprobs is not None
        assert choice.logprobs.logprob == pytest.approx(0.0, abs=1e-9)
        assert all(math.isfinite(p) for _, p in choice.logprobs.top)


@pytest.mark.parametrize("temperature", [1e30, 1e308])
def test_huge_temperatures_are_uniform(temperature: float) -> None:
    row = torch.tensor([1.0, 30.0, -math.inf, 29.0])
    shares = dict(intervals(row, SamplingParams(temperature=temperature)))
    assert shares.keys() == {0, 1, 3}
    assert max(shares.values()) - min(shares.values()) <= 1


def test_ends_of_u() -> None:
    row = torch.tensor([0.0, 5.0, -60.0, 5.0, -math.inf])
    assert draw(row, SamplingParams(), 0.0).token == 1
    assert draw(row, SamplingParams(), LAST).token == 0  # -60: too little for even the last draw
    assert draw(torch.tensor([-7.0]), SamplingParams(), LAST, 5).token == 0


def test_fewer_alternatives_than_asked() -> None:
    choice = draw(logs(0.5, 0.25, 0.25, 0.0), SamplingParams(top_k=2), 0.0, 20)
    assert choice.logprobs is not None
    assert [t for t, _ in choice.logprobs.top] == [0, 1]
    choice = draw(logs(0.5, 0.25, 0.25, 0.0), SamplingParams(), 0.0, 20)
    assert choice.logprobs is not None
    assert [t for t, _ in choice.logprobs.top] == [0, 1, 2]


def adversarial_rows(vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(vocab, generator=generator)
    falling = -torch.arange(1, vocab + 1).double().log().float()[torch.randperm(vocab, generator=generator)]
    spike = torch.full((vocab,), -3.0)
    spike[vocab // 2] = 4.0
    holes = noise.masked_fill(torch.rand(vocab, generator=generator) < 0.95, -math.inf)
    holes[1] = 0.5
    lone = torch.full((vocab,), -math.inf)
    lone[vocab - 1] = -1e30
    return [
        noise,
        torch.zeros(vocab),
        (noise * 2).round() + 0.0,
        (noise * 4).bfloat16().float(),
        falling * 1.1,
        spike,
        holes,
        lone,
        torch.linspace(0, 1e-4, vocab),
        noise * 1e30,
    ]


@pytest.mark.parametrize("vocab", [3, 129, 5000])
def test_prefixes_decide_as_the_whole_row(vocab: int) -> None:
    rng = random.Random(vocab)
    filters = [
        SamplingParams(temperature=t, top_p=p, min_p=m, top_k=k)
        for t, p, m, k in itertools.product((0.5, 1.0), (1.0, 0.9), (0.0, 0.1), (0, 40))
    ]
    widths = [(1,), (2,), (128,), (1, 2, 128), WIDTHS, (vocab - 1,), (vocab,)]
    for row in adversarial_rows(vocab):
        for params in rng.sample(filters, 8):
            for u in (0.0, rng.random(), min(LAST, 1 - rng.random() ** 9 / 2), LAST):
                for wanted in (-1, 5):
                    whole = draw(row, params, u, wanted, widths=())
                    for width in widths:
                        assert draw(row, params, u, wanted, widths=width) == whole, (params, u, width)


def test_prefixes_switch_at_the_same_draw() -> None:
    """Around the very u at which the whole row changes its mind, so does every prefix."""
    row = (torch.randn(300, generator=torch.Generator().manual_seed(8)) * 3).round() + 0.0
    params, edge = SamplingParams(top_p=0.95), 0
    for token, share in intervals(row, params):
        for at in {edge, edge + share // 2, edge + share - 1}:
            assert {draw(row, params, at / UNIT, widths=w).token for w in ((1,), (2, 64), (128,), ())} == {token}
        edge += share
    assert edge == UNIT
