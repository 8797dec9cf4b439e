"""The arithmetic of the generated model: against a plain reference, drafted and not, with every layer at work."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=5)
SETTINGS = {"max_concurrency": 2, "kv_capacity": 1024, "prefix_cache_gib": 0.01}
BLOCKS = tuple(range(1, 8))


def engine_of(model: LoadedModel, folder: Path, depth: int) -> Engine:
    draft = {"mtp_depth": depth} if depth else {"mtp": False}
    settings = EngineSettings(**SETTINGS, **draft)  # type: ignore[arg-type]
    return build_engine(prepare(model, folder, settings), torch.device("cpu"), lambda stage, done, total: None)


def reply(
    engine: Engine, prompt: Sequence[int], count: int, params: SamplingParams, chunk: int = 512
) -> tuple[list[int], float]:
    """``count`` tokens, and the share of drafts that stood."""
    starts = range(0, len(prompt), chunk)
    operations: list[Operation] = [Begin(0, 0, tuple(prompt), params, -1, BLOCKS, 0)]
    operations += [Prefill(0, s, len(prompt[s : s + chunk]), s + chunk >= len(prompt)) for s in starts]
    tokens: list[int] = []
    drafted = accepted = 0
    while len(tokens) < count:
        for result in engine.execute(0, operations).slots:
            tokens += result.tokens
            drafted += result.drafted
            accepted += len(result.tokens) - 1 if result.drafted else 0
        operations = [Decode((0,), engine.depth)]
    engine.execute(0, [Release(0)])
    return tokens[:count], accepted / drafted if drafted else 0.0


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def reference(toy_path: Path, toy_checkpoint: Path) -> Any:
    """The plain forward that the generated package is tested with."""
    spec = importlib.util.spec_from_file_location("toy_reference", toy_path / "tests" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = json.loads((toy_checkpoint / "config.json").read_text())
    return module.Reference(load_file(toy_checkpoint / "model.safetensors"), config)


def drafts_of(reference: Any, tokens: Sequence[int], depth: int) -> list[int]:
    """What the drafter proposes after ``tokens``: row r of its layer knows token r + 1 and predicts token r + 2."""
    hidden, following = reference.hidden(tokens[:-1]), list(tokens[1:])
    for _ in range(depth):
        x = reference.weights["model.embed.weight"][following]
        x = x + reference.product(reference.norm(hidden, "draft.hidden_norm"), "draft.mix")
        x = x + reference.attention(reference.norm(x, "draft.mixer.norm"), "draft.mixer")
        own = reference.norm(x, "draft.norm")[-1:]
        following.append(int(reference.logits(own).argmax()))
        hidden = torch.cat((hidden, own))
    return following[-depth:]


@pytest.mark.parametrize(("length", "chunk"), [(1, 512), (30, 512), (100, 512), (100, 16), (100, 1)])
def test_replies_are_the_references(
    toy: LoadedModel, toy_checkpoint: Path, reference: Any, length: int, chunk: int
) -> None:
    """Every greedy token is the reference's best, or within rounding of it."""
    prompt = prompt_of(length, seed=length)
    tokens, _ = reply(engine_of(toy, toy_checkpoint, 0), prompt, 40, GREEDY, chunk)
    logits = reference.logits(reference.hidden([*prompt, *tokens]))[length - 1 : -1]
    best = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    assert best.max() < 1e-3


def test_drafts_are_the_references(toy: LoadedModel, toy_checkpoint: Path, reference: Any) -> None:
    engine, ids = engine_of(toy, toy_checkpoint, 3), prompt_of(50, seed=2)
    operations: list[Operation] = [Begin(0, 0, tuple(ids), GREEDY, -1, BLOCKS, 0)]
    operations += [Prefill(0, 0, 20, False), Prefill(0, 20, 30, True)]
    for _ in range(8):
        for result in engine.execute(0, operations).slots:
            ids += result.tokens
        assert engine.drafts[0].tolist() == drafts_of(reference, ids, 3)
        operations = [Decode((0,), 3)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("length", [5, 70])
def test_a_draft_changes_no_reply_and_often_stands(
    toy: LoadedModel, toy_checkpoint: Path, params: SamplingParams, length: int
) -> None:
    prompt = prompt_of(length, seed=3)
    plain, _ = reply(engine_of(toy, toy_checkpoint, 0), prompt, 150, params)
    for depth, least in ((1, 0.25), (3, 0.1)):
        drafted, accepted = reply(engine_of(toy, toy_checkpoint, depth), prompt, 150, params)
        assert drafted == plain
        assert least < accepted < 1.0, "drafts must be both accepted and rejected to prove anything"
    assert len(set(plain)) > 30, "a reply that repeats itself proves little"


@pytest.mark.parametrize(
    "part", ["layers.0.mixer.out", "layers.1.mixer.out", "layers.2.mixer.out", "layers.0.mlp.down"]
)
def test_every_kind_of_layer_has_its_say(toy: LoadedModel, toy_checkpoint: Path, tmp_path: Path, part: str) -> None:
    without = tmp_path / "without"
    shutil.copytree(toy_checkpoint, without)
    tensors = load_file(without / "model.safetensors")
    tensors[f"model.{part}.weight"].zero_()
    save_file(tensors, without / "model.safetensors")
    whole, cut = engine_of(toy, toy_checkpoint, 0), engine_of(toy, without, 0)
    prompts = [prompt_of(40, seed=seed) for seed in range(3)]
    assert any(reply(whole, prompt, 30, GREEDY) != reply(cut, prompt, 30, GREEDY) for prompt in prompts)
