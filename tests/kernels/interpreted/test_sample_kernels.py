"""Sampling on the device in the interpreter, against the host's exact draw."""

from __future__ import annotations

import itertools

import pytest
import torch

from dgpp_core.ops.kernels.sample import choose_tokens, row_weights
from dgpp_core.sampling.device import sampled_row, table
from dgpp_core.sampling.draw import draw
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.random import uniform

V, CHUNK, CHUNKS = 150, 64, 3
G = torch.Generator().manual_seed(9)


def run(logits: torch.Tensor, params: list[SamplingParams], positions: torch.Tensor, kept: int) -> list[int]:
    """One row a slot through both kernels, with ``kept`` candidates."""
    rows = len(params)
    ways = table(rows, torch.device("cpu"))
    for slot, each in enumerate(params):
        row = sampled_row(each, V)
        if row is not None:
            ways[slot] = torch.tensor(row)
    slots, picked = torch.arange(rows), logits.argmax(dim=1)
    order = torch.sort(logits + 0.0, dim=1, descending=True, stable=True)
    weights, masses = torch.full((rows, V), -1), torch.full((rows, CHUNKS), -1)
    row_weights[(CHUNKS, rows)](
        logits, picked, slots, ways, weights, masses, V=V, WIDTH=1, CHUNK=CHUNK, CHUNKS=CHUNKS, PDL=False
    )
    choose_tokens[(rows,)](
        logits, weights, masses, order.values[:, :kept].contiguous(), order.indices[:, :kept].contiguous(), slots,
        positions, ways, picked, V=V, WIDTH=1, KEPT=kept, CHUNKS=CHUNKS, SPAN=4, BLOCK=256, PDL=False,
    )  # fmt: skip
    return picked.tolist()


WAYS = [
    SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=(1 << 64) - 1 - 7 * k)
    for t, p, k, m in itertools.product((0.7, 1.0, 3.0), (1.0, 0.9, 0.01), (0, 1, 40, 200), (0.0, 0.02))
]


@pytest.mark.parametrize(("kept", "stride"), [(8, 7), (128, 4)])
def test_picks_are_those_of_the_hosts_draw(kept: int, stride: int) -> None:
    """With few candidates most rows have to be searched as a whole; the picks are the same."""
    ways = WAYS[::stride]
    logits = torch.randn(len(ways), V, generator=G) * 2
    logits[::5] = logits[::5].round()  # ties
    logits[3, 10:] = float("-inf")
    positions = torch.randint(0, 1 << 20, (len(ways),), generator=G)
    found = run(logits, ways, positions, kept)
    wanted = [
        draw(row + 0.0, each, uniform(each.seed, int(at) + 1)).token
        for row, each, at in zip(logits, ways, positions, strict=True)
    ]
    assert found == wanted
    assert sum(a != b for a, b in zip(found, logits.argmax(dim=1).tolist(), strict=True)) > len(ways) // 4


def test_a_greedy_row_keeps_its_pick_beside_one_that_samples() -> None:
    logits = torch.randn(2, V, generator=G)
    ways = [SamplingParams(temperature=0.0), SamplingParams(temperature=5.0, seed=1)]
    found = run(logits, ways, torch.tensor([5, 6]), 128)
    assert found[0] == int(logits[0].argmax())
    assert found[1] == draw(logits[1], ways[1], uniform(1, 7)).token


def test_what_the_device_cannot_hold_is_left_to_the_host() -> None:
    assert sampled_row(SamplingParams(temperature=0.0), V) is None
    assert sampled_row(SamplingParams(top_p=1e-30), V) is None
    assert sampled_row(SamplingParams(), 100) is None
