"""The drafter of DeepSeek-V4.1-Flash against its equations, however its window came about."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.testing.world import World

TOKENS = torch.randint(3, 500, (70,), generator=torch.Generator().manual_seed(9)).tolist()


def batch(start: int, count: int, *, decode: bool) -> StepBatch:
    at = torch.arange(start, start + count)
    return StepBatch(
        tokens=torch.tensor(TOKENS)[at], positions=at, counts=(count,), slots=torch.tensor([1]),
        lengths=torch.tensor([start]), block_tables=torch.arange(1, 9)[None], candidates=torch.tensor([0]),
        keep_rows=decode, max_length=start + count,
    )  # fmt: skip


@pytest.fixture
def world(plain_rows: LoadedModel, checkpoint: Path) -> World:
    settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=True, mtp_depth=5)
    return World.from_checkpoint(plain_rows, checkpoint, settings)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, reference: ModuleType) -> Any:
    config = json.loads((checkpoint / "config.json").read_text())
    return reference.Plain(load_file(checkpoint / "model.safetensors"), config)


@torch.inference_mode()
def observed(world: World, counts: list[int], *, decode: bool = False, wrong: int = 0) -> Any:
    """Run and observe so many rows a step, ``wrong`` rows of other tokens after each; the drafter."""
    drafter, pools, start = world.engine.drafter, world.engine.state.pools, 0
    assert drafter is not None
    for count in counts:
        rows = batch(start, count + wrong, decode=decode)
        if wrong:
            rows.tokens[count:] = 7
        hidden = world.engine.model.forward(rows, pools)
        drafter.observe(rows, hidden, torch.zeros(count + wrong, dtype=torch.int64), pools)
        start += count
    return drafter


@torch.inference_mode()
def drafted(world: World, drafter: Any, length: int, depth: int) -> tuple[list[int], Tensor]:
    """Drafts after so many tokens, and their confidence."""
    tail, following = batch(length - 1, 1, decode=True), torch.tensor([TOKENS[length]])
    drafts, confidence = drafter.drafted(tail, torch.empty(0), following, depth, world.engine.state.pools)
    assert torch.equal(drafter.propose(tail, torch.empty(0), following, depth, world.engine.state.pools), drafts)
    return drafts[0].tolist(), confidence[0]


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 60])
def test_a_block_and_how_sure_it_is(world: World, plain: Any, length: int) -> None:
    """Shorter than the window, as long, and longer."""
    _, kept = plain.hidden(TOKENS[:length])
    rows = plain.drafter_rows(kept, torch.arange(length))
    wanted, _, sure = plain.draft(TOKENS[length], rows, length)
    drafter = observed(world, [length])
    for depth in (1, 2, 5):
        found, confidence = drafted(world, drafter, length, depth)
        assert found == wanted[:depth]
        assert torch.allclose(confidence.double(), sure[:depth], rtol=0, atol=1e-4)


def test_every_way_through_leaves_the_same_block(world: World) -> None:
    """Chunks, single rows, and rejected rows after each step."""
    whole = drafted(world, observed(world, [60]), 60, 5)
    for counts, decode, wrong in (
        ([7, 1, 30, 22], False, 0), ([30, 1, 2, 1, 26], True, 0), ([40, 1, 2, 1, 3, 4, 1, 4, 4], True, 2),
    ):  # fmt: skip
        found = drafted(world, observed(world, counts, decode=decode, wrong=wrong), 60, 5)
        assert found[0] == whole[0]
        assert torch.equal(found[1], whole[1])


@torch.inference_mode()
def test_blocks_in_company(world: World) -> None:
    """Two requests of different lengths in one call draft what each drafts alone."""
    drafter, pools = observed(world, [40]), world.engine.state.pools
    at = torch.arange(25)
    other = StepBatch(
        tokens=torch.tensor(TOKENS)[at], positions=at, counts=(25,), slots=torch.tensor([0]),
        lengths=torch.tensor([0]), block_tables=torch.arange(9, 17)[None], candidates=torch.tensor([0]),
        keep_rows=False, max_length=25,
    )  # fmt: skip
    drafter.observe(other, world.engine.model.forward(other, pools), at, pools)
    tail = StepBatch(
        tokens=torch.tensor([TOKENS[39], TOKENS[24]]), positions=torch.tensor([39, 24]), counts=(1, 1),
        slots=torch.tensor([1, 0]), lengths=torch.tensor([39, 24]), block_tables=torch.arange(1, 17).view(2, 8),
        candidates=torch.tensor([0, 0]), keep_rows=True, max_length=40,
    )  # fmt: skip
    both, sure = drafter.drafted(tail, torch.empty(0), torch.tensor([TOKENS[40], TOKENS[25]]), 5, pools)
    alone = drafted(world, drafter, 40, 5)
    assert both[0].tolist() == alone[0]
    assert torch.equal(sure[0], alone[1])
