"""GLM-4.7 against transformers on its released layouts: every format, prefill and step by step, and the draft layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World

FORMATS = ("bf16", "fp8", "nvfp4")
TOKENS = torch.randint(512, (75,), generator=torch.Generator().manual_seed(31)).tolist()
BLOCK = 16
Release = Callable[..., tuple[Any, Path]]


def world(folder: Path, **settings: Any) -> World:
    model = load_plugins(environ={}).model("glm47")
    values = {"max_concurrency": 2, "kv_capacity": 512, "block_tokens": BLOCK, "mtp": True, "mtp_depth": 3}
    return World.from_checkpoint(model, folder, EngineSettings(**(values | settings)))


def steps(tokens: list[int], counts: list[int], first: int = 0) -> list[StepBatch]:
    """The text in so many rows a step, at positions from ``first`` on; single rows are decode steps."""
    made, start = [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        made.append(
            StepBatch(
                tokens=torch.tensor(tokens)[at], positions=at + first, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start + first]), block_tables=torch.arange(1, 12)[None],
                candidates=torch.tensor([0]), keep_rows=count == 1, max_length=start + first + count,
            )
        )  # fmt: skip
        start += count
    return made


@torch.inference_mode()
def forward(served: World, batches: list[StepBatch]) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all rows."""
    model, pools = served.engine.model, served.engine.state.pools
    hidden = torch.cat([model.forward(batch, pools) for batch in batches])
    return hidden, model.logits(hidden)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


WAYS = [[75], [1] * 75, [40, 16, 1, 1, 17]]


@pytest.mark.parametrize("counts", WAYS, ids=["prefill", "step by step", "mixed"])
@pytest.mark.parametrize("fmt", FORMATS)
@torch.inference_mode()
def test_logits(release: Release, fmt: str, counts: list[int]) -> None:
    pair, folder = release(fmt)
    hidden, logits = forward(world(folder), steps(TOKENS, counts))
    assert relative(hidden, pair.hidden(TOKENS)) <= 1e-5
    assert relative(logits, pair.model(torch.tensor([TOKENS])).logits[0]) <= 1e-5


@pytest.mark.parametrize("fmt", FORMATS)
@torch.inference_mode()
def test_the_draft_layer(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    served = world(folder)
    drafter, pools = served.engine.drafter, served.engine.state.pools
    assert drafter is not None
    (batch,) = steps(TOKENS[:-1], [74])
    hidden, _ = forward(served, [batch])
    own = drafter.observe(batch, hidden, torch.tensor(TOKENS[1:]), pools)
    wanted = pair.drafted(pair.hidden(TOKENS[:-1]), TOKENS[1:])
    assert relative(own, wanted) <= 1e-5
    assert relative(served.engine.model.logits(own), pair.model.lm_head(wanted)) <= 1e-5
    shifted = pair.drafted(pair.hidden(TOKENS[:-1]), TOKENS[1:], first=1)
    assert relative(own, shifted) <= 1e-5, "only distances count, so a runner may give row q the position q + 1"


@torch.inference_mode()
def test_grouped_experts(release: Release) -> None:
    pair, folder = release("bf16", n_group=4, topk_group=2)
    _, logits = forward(world(folder), steps(TOKENS, [75]))
    assert relative(logits, pair.model(torch.tensor([TOKENS])).logits[0]) <= 1e-5
    plain, _ = release("bf16")
    assert relative(logits, plain.model(torch.tensor([TOKENS])).logits[0]) > 1e-3, "groups must make a difference"


def interleaved(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The other reading of rotation: neighbouring dimensions are a pair."""
    width = 2 * cos.shape[-1]
    even, odd = heads[..., :width:2], heads[..., 1:width:2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((turned, heads[..., width:]), -1)


@torch.inference_mode()
def test_rotation_depends_on_the_distance_and_on_which_dimensions_are_a_pair(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens at other distances, and the plausible wrong rotation, must both show."""
    pair, folder = release("bf16")
    tokens = [7, 9, 11, 13] * 15
    _, logits = forward(world(folder), steps(tokens, [60]))
    wanted = pair.model(torch.tensor([tokens])).logits[0].detach()
    assert relative(logits, wanted) <= 1e-5
    assert relative(logits[4:8], logits[56:60]) > 1e-3
    monkeypatch.setattr("dgpp_core.layers.gqa.rotate", interleaved)
    _, wrong = forward(world(folder), steps(tokens, [60]))
    assert relative(wrong[:1], wanted[:1]) <= 1e-5, "position 0 is not turned at all"
    assert relative(wrong[16:], wanted[16:]) > 1e-2


@pytest.mark.parametrize("fmt", FORMATS)
def test_greedy_replies_are_those_of_transformers(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    prompt = TOKENS[:33]
    wanted = pair.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=-1)
    for depth in (0, 3):
        served = world(folder, mtp=depth > 0, mtp_depth=max(1, depth))
        assert served.reply(prompt, 16).tokens == wanted[0, 33:].tolist()


def test_a_quantised_release_differs_from_the_dense_one(release: Release) -> None:
    """Or the tests above could not tell whether the stored values were used."""
    logits = [forward(world(release(fmt)[1]), steps(TOKENS, [75]))[1] for fmt in FORMATS]
    assert relative(logits[1], logits[0]) > 1e-3
    assert relative(logits[2], logits[0]) > 1e-2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fmt", FORMATS)
def test_ranks_that_share_a_stored_checkpoint(release: Release, fmt: str, ranks: int) -> None:
    """Each rank cuts the stored form: heads, slices of every expert, vocabulary rows; scales go with their values."""
    pair, folder = release(fmt)
    model = load_plugins(environ={}).model("glm47")
    settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=BLOCK, mtp=True, mtp_depth=2)
    shared = TensorParallelWorld.load(model, folder, settings, ranks)
    prompt = TOKENS[:33]
    wanted = pair.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert shared.reply(prompt, 8).tokens == wanted[0, 33:].tolist()
