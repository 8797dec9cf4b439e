"""Tiny models of every family beside GLM-4.7 and Llama on a CUDA device, their layers as torch operations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.main import cli
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.served_world import Crowd, served_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
FAMILIES = {
    "glm53": "dgpp_glm", "glm53-flash": "dgpp_glm", "qwen38-flash-next": "dgpp_qwen", "mimo26-flash": "dgpp_mimo",
    "deepseek41-flash": "dgpp_deepseek",
}  # fmt: skip
PROMPT = [(7 * i + 3) % 512 for i in range(18)]


def model_of(name: str) -> LoadedModel:
    pytest.importorskip(FAMILIES[name])
    return load_plugins(environ={}).model(name)


def synthesised(model: LoadedModel, folder: Path, form: str = "bf16") -> Path:
    raw, dtype = in_format(model.spec, model.spec.tiny_config, form)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4, dtype=dtype)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen38-flash-next"])
def test_ranks_agree_to_the_bit(name: str, ranks: int, tmp_path: Path) -> None:
    """All on one device, drafting; the world compares what the ranks compute in every tick."""
    model = model_of(name)
    settings = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=min(3, model.spec.draft_depth))
    world = TensorParallelWorld.load(model, synthesised(model, tmp_path), settings, ranks, device="cuda")
    replies = [world.reply(PROMPT, 24).tokens for _ in range(2)]
    assert replies[0] == replies[1]
    assert len(replies[0]) == 24


@pytest.mark.parametrize("form", ["bf16", "mxfp4"])
def test_logprobs_of_mimo_are_near_those_of_the_cpu(form: str, tmp_path: Path) -> None:
    model = model_of("mimo26-flash")
    folder = synthesised(model, tmp_path, form)
    settings = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=3)
    first = []
    for device in ("cpu", "cuda"):
        logprobs = World.from_checkpoint(model, folder, settings, device=device).reply(PROMPT, 1, logprobs=20).logprobs
        first.append(dict(logprobs[0].top))
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 10
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_service_answers_with_graphs_and_drafts(name: str, tmp_path: Path) -> None:
    model_of(name)
    done = CliRunner().invoke(cli, ["synth", name, "--tiny", str(tmp_path / "tiny")])
    assert done.exit_code == 0, done.stderr
    arguments = [
        f"--plugin={name}",
        f"--checkpoint={tmp_path / 'tiny'}",
        "--device=cuda",
        "--mtp-depth=2",
        "--no-image",
    ]
    with served_world(tmp_path / "log", arguments, environ=os.environ) as world:
        answers = Crowd(world, 3, tokens=48).answers(60)
        assert [answer and answer.status for answer in answers] == [200] * 3, world.log
        assert world.complete("The quick brown fox", 48).status == 200
