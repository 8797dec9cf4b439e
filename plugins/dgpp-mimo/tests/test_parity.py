"""MiMo-V2.6-Flash against transformers on its released layouts: prefill, step by step, draft blocks, several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing import TensorParallelWorld, World

FORMATS = ("bf16", "mxfp4")
TOKENS = torch.randint(512, (75,), generator=torch.Generator().manual_seed(31)).tolist()
Release = Callable[[str], tuple[Any, Path]]


def settings(depth: int) -> EngineSettings:
    return EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=depth > 0, mtp_depth=max(depth, 1))


def world(folder: Path, depth: int = 3) -> World:
    return World.from_checkpoint(load_plugins(environ={}).model("mimo26-flash"), folder, settings(depth))


def steps(counts: list[int]) -> list[StepBatch]:
    """The text in so many rows a step; single rows are decode steps."""
    made, start = [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        made.append(
            StepBatch(
                tokens=torch.tensor(TOKENS)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start]), block_tables=torch.arange(1, 12)[None], candidates=torch.tensor([0]),
                keep_rows=count == 1, max_length=start + count,
            )
        )  # fmt: skip
        start += count
    return made


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("counts", [[75], [1] * 75, [40, 16, 1, 1, 17]], ids=["prefill", "step by step", "mixed"])
@pytest.mark.parametrize("fmt", FORMATS)
@torch.inference_mode()
def test_logits(release: Release, fmt: str, counts: list[int]) -> None:
    pair, folder = release(fmt)
    engine = world(folder).engine
    hidden = torch.cat([engine.model.forward(batch, engine.state.pools) for batch in steps(counts)])
    assert relative(hidden, pair.hidden(TOKENS)) <= 1e-5
    assert relative(engine.model.logits(hidden), pair.model(torch.tensor([TOKENS])).logits[0]) <= 1e-5


@pytest.mark.parametrize("fmt", FORMATS)
@torch.inference_mode()
def test_the_draft_blocks(release: Release, fmt: str) -> None:
    """The first one's rows, and the drafts of all three after each prefix."""
    pair, folder = release(fmt)
    engine = world(folder).engine
    drafter, pools = engine.drafter, engine.state.pools
    assert drafter is not None
    for count in (1, 2, 30, 74):
        (batch,) = steps([count])
        hidden, text = engine.model.forward(batch, pools), TOKENS[: count + 1]
        own = drafter.observe(batch, hidden, torch.tensor(text[1:]), pools)
        theirs = pair.hidden(text[:-1])
        assert relative(own, pair.drafted(0, theirs, text[1:])) <= 1e-5
        tail = StepBatch(
            tokens=batch.tokens[-1:], positions=batch.positions[-1:], counts=(1,), slots=batch.slots,
            lengths=batch.positions[-1:], block_tables=batch.block_tables, candidates=batch.candidates, keep_rows=True,
            max_length=count,
        )  # fmt: skip
        drafts = drafter.propose(tail, own[-1:], torch.tensor(text[-1:]), 3, pools)
        for block in range(3):
            logits = pair.model.lm_head(pair.drafted(block, theirs, text[1 + block :])[-1])
            text.append(int(logits.argmax()))
        assert drafts.tolist() == [text[-3:]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("fmt", FORMATS)
def test_greedy_replies_are_those_of_transformers(release: Release, fmt: str, ranks: int) -> None:
    """Each rank takes whole chunks of the fused projection in its stored form, with their scales."""
    pair, folder = release(fmt)
    prompt = TOKENS[:33]
    wanted = pair.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    model = load_plugins(environ={}).model("mimo26-flash")
    for depth in (0, 3):
        served = TensorParallelWorld.load(model, folder, settings(depth), ranks) if ranks > 1 else world(folder, depth)
        assert served.reply(prompt, 12).tokens == wanted[0, 33:].tolist()


@torch.inference_mode()
def test_what_the_quantised_release_stores_makes_a_difference(release: Release) -> None:
    """Or the tests above could not tell whether the stored values were used."""
    dense, stored = (release(fmt)[0].model(torch.tensor([TOKENS])).logits[0] for fmt in FORMATS)
    assert relative(stored, dense) > 1e-2
