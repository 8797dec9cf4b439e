"""Qwen3.8-Flash-Next against transformers on its released layouts: every format, every way to feed it, the drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.api import CheckpointError, StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing import TensorParallelWorld, World

FORMATS = ("bf16", "fp8", "nvfp4")
LENGTH = 75
TOKENS = torch.randint(3, 512, (LENGTH,), generator=torch.Generator().manual_seed(31)).tolist()
TOKENS[13] = TOKENS[40] = 2  # ends of texts, across which no n-gram reaches
Release = Callable[[str], tuple[Any, Path]]


def settings(**changes: Any) -> EngineSettings:
    values = {"max_concurrency": 2, "kv_capacity": 512, "block_tokens": 16, "mtp": True, "mtp_depth": 4}
    return EngineSettings(**(values | changes))


def world(folder: Path, form: EngineSettings | None = None) -> World:
    return World.from_checkpoint(load_plugins(environ={}).model("qwen38-flash-next"), folder, form or settings())


def steps(tokens: list[int], counts: list[int]) -> list[StepBatch]:
    """The text in so many rows a step; single rows are decode steps."""
    made, start = [], 0
    for count in counts:
        at = torch.arange(start, start + count)
        made.append(
            StepBatch(
                tokens=torch.tensor(tokens)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start]), block_tables=torch.arange(1, 12)[None], candidates=torch.tensor([0]),
                keep_rows=count == 1, max_length=start + count,
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


WAYS = {"prefill": [LENGTH], "step by step": [1] * LENGTH, "mixed": [2, 38, 16, 1, 1, 17]}


@pytest.mark.parametrize("fmt", FORMATS)
def test_logits_in_prefill_and_the_same_bits_otherwise(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    branches, wanted = pair.run(TOKENS)
    found = {way: forward(world(folder), steps(TOKENS, counts)) for way, counts in WAYS.items()}
    hidden, logits = found["prefill"]
    assert relative(hidden, branches) <= 1e-5
    assert relative(logits, wanted) <= 1e-5
    assert all(torch.equal(other, logits) for _, other in found.values())


def test_a_quantised_release_differs_from_the_dense_one(release: Release) -> None:
    """Or the test above could not tell whether the stored values were used."""
    logits = [forward(world(release(fmt)[1]), steps(TOKENS, [LENGTH]))[1] for fmt in FORMATS]
    assert relative(logits[1], logits[0]) > 1e-3
    assert relative(logits[2], logits[1]) > 1e-2


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@torch.inference_mode()
def test_the_draft_layer_and_its_chain(release: Release, fmt: str) -> None:
    pair, folder = release(fmt)
    served, depth, ids = world(folder), 4, list(TOKENS)
    drafter, pools = served.engine.drafter, served.engine.state.pools
    assert drafter is not None
    (batch,) = steps(TOKENS[:-1], [LENGTH - 1])
    hidden, _ = forward(served, [batch])
    own = drafter.observe(batch, hidden, torch.tensor(ids[1:]), pools)
    branches, _ = pair.run(ids[:-1])
    wanted, following = branches, ids[1:]
    drafts: list[int] = []
    for _ in range(depth):
        made, logits = pair.drafted(wanted, following)
        if not drafts:
            assert relative(own, made) <= 1e-5
        drafts.append(int(logits[-1].argmax()))
        wanted, following = torch.cat((wanted, made[-1:])), [*following, drafts[-1]]
    (tail,) = steps([0] * (LENGTH - 1), [LENGTH - 1])
    last = StepBatch(
        tokens=tail.tokens[-1:], positions=tail.positions[-1:], counts=(1,), slots=tail.slots,
        lengths=tail.positions[-1:], block_tables=tail.block_tables, candidates=tail.candidates, keep_rows=True,
        max_length=LENGTH - 1,
    )  # fmt: skip
    assert drafter.propose(last, own[-1:], torch.tensor(ids[-1:]), depth, pools).tolist() == [drafts]


@pytest.fixture(scope="module")
def continued(release: Release) -> Callable[[str], list[int]]:
    """What the class says after the beginning of the text, its likeliest tokens."""
    found: dict[str, list[int]] = {}

    def run(fmt: str) -> list[int]:
        if fmt not in found:
            ids = TOKENS[:33]
            for _ in range(8):
                ids = [*ids, int(release(fmt)[0].run(ids)[1][-1].argmax())]
            found[fmt] = ids[33:]
        return found[fmt]

    return run


@pytest.mark.parametrize(("fmt", "ranks"), [("bf16", 1), *((fmt, n) for fmt in FORMATS[1:] for n in (1, 2, 4))])
def test_greedy_replies_are_those_of_the_class(
    release: Release, continued: Callable[[str], list[int]], fmt: str, ranks: int
) -> None:
    """Also of ranks, which cut blocks of scales to 96 and 48 rows of an expert and share key/value heads."""
    model, (_, folder) = load_plugins(environ={}).model("qwen38-flash-next"), release(fmt)
    for depth in (0, 4) if ranks == 1 else (4,):
        form = settings(mtp=depth > 0, mtp_depth=max(1, depth))
        served = TensorParallelWorld.load(model, folder, form, ranks) if ranks > 1 else world(folder, form)
        assert served.reply(TOKENS[:33], 8).tokens == continued(fmt)


def test_a_table_with_other_constants_is_refused(release: Release, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, folder = release("bf16")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.ple.ple_embedding.layer_multipliers"
    tensors[name] = tensors[name] + 2
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="layer_multipliers"):
        world(tmp_path)
