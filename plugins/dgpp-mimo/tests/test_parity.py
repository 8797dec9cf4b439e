"""MiMo-V2.6-Flash against transformers on its released layouts: prefill, step by step, draft blocks, several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_keys_and_values_in_eight_bits(release: Release, ranks: int) -> None:
    """Scales are a head's own, so ranks reply alike; drafts, chunks and company change no token either."""
    _, folder = release("bf16")
    model, prompt, found = load_plugins(environ={}).model("mimo26-flash"), TOKENS[:33], []
    for depth, chunk in ((0, 64), (3, 16)):
        form = msgspec.structs.replace(settings(depth), kv_dtype="fp8", prefill_budget_tokens=chunk)
        served = (
            TensorParallelWorld.load(model, folder, form, ranks)
            if ranks > 1
            else World.from_checkpoint(model, folder, form)
        )
        pools = served.engine.state.pools
        assert {pools[name].dtype for name in ("k", "v", "window_k", "window_v", "draft_k", "draft_v")} == {torch.uint8}
        assert (pools["k"].shape[-1], pools["window_v"].shape[-1]) == (48 + 4, 32 + 4)
        other = served.submit(TOKENS[40:70], 12)
        mine = served.submit(prompt, 12)
        replies = served.run()
        found.append((replies[mine].tokens, replies[other].tokens))
    assert found[0] == found[1]


def in_eight_bits(rows: Tensor) -> Tensor:
    """Each row of a head in e4m3 with a scale, by its definition."""
    amax = rows.abs().amax(-1, keepdim=True)
    return (rows * (448 / amax)).to(torch.float8_e4m3fn).float() * (amax / 448)


@torch.inference_mode()
def test_eight_bits_are_those_of_a_class_that_rounds_them(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the last bit: a value in between two codes may go to either."""
    from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as parts

    pair, folder = release("bf16")
    model, logits = load_plugins(environ={}).model("mimo26-flash"), []
    engine = World.from_checkpoint(model, folder, msgspec.structs.replace(settings(0), kv_dtype="fp8")).engine
    for counts in ([75], [1] * 75):
        rows = [engine.model.forward(batch, engine.state.pools) for batch in steps(counts)]
        logits.append(engine.model.logits(torch.cat(rows)))
    assert torch.equal(logits[0], logits[1])
    exact, plain = pair.model(torch.tensor([TOKENS])).logits[0], parts.eager_attention_forward

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        return plain(module, query, in_eight_bits(key), in_eight_bits(value), *rest, **more)

    monkeypatch.setattr(parts, "eager_attention_forward", rounded)
    wanted = pair.model(torch.tensor([TOKENS])).logits[0]
    assert ((logits[0] - wanted).norm() / wanted.norm()).item() < 0.02
    assert ((logits[0] - exact).norm() / exact.norm()).item() > 0.05
