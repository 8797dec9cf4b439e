"""Tiny DeepSeek-V4.1-Flash on a CUDA device, its layers as torch operations: near the CPU in both formats."""

from pathlib import Path

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Prefill
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
PROMPT = [(7 * i + 3) % 512 for i in range(8)]
"""So short that every entry is seen: a choice that rounding turns would be a difference of another kind."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    pytest.importorskip("dgpp_deepseek")
    return load_plugins(environ={}).model("deepseek41-flash")


@pytest.mark.parametrize("fmt", ["bf16", "fp8-fp4"])
def test_logprobs_are_near_those_of_the_cpu(model: LoadedModel, fmt: str, tmp_path: Path) -> None:
    raw, dtype = in_format(model.spec, model.spec.tiny_config, fmt)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype=dtype)
    first = []
    for device in ("cpu", "cuda"):
        settings = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=5)
        engine = World.from_checkpoint(model, tmp_path, settings, device=device).engine
        begin, prefill = Begin(0, 0, tuple(PROMPT), GREEDY, 20, (1, 2), 0), Prefill(0, 0, len(PROMPT), True)
        found = engine.execute(0, [begin, prefill]).slots[0].logprobs
        assert found is not None
        first.append(dict(found[0].top))
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 10
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.5


def test_replies_from_graphs_drafted_and_not(model: LoadedModel, tmp_path: Path) -> None:
    """Decode steps are captured: nothing in them reads a device value."""
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=5)
    found = []
    for depth in (0, 5):
        settings = EngineSettings(max_concurrency=2, kv_capacity=1024, mtp=depth > 0, mtp_depth=max(1, depth))
        world = World.from_checkpoint(model, tmp_path, settings, device="cuda")
        found.append([world.reply(PROMPT * 4, 12).tokens for _ in range(2)])
    assert found[0][0] == found[0][1]
    assert all(len(reply) == 12 for replies in found for reply in replies)


def test_depths_by_confidence_from_graphs_and_without(model: LoadedModel, tmp_path: Path) -> None:
    """The logits come to the host with a step's tokens; captured and not, the same steps are taken."""
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=5)
    settings = EngineSettings(
        max_concurrency=2, kv_capacity=1024, mtp=True, mtp_depth=5, mtp_schedule=True, mtp_schedule_lambda=0.08
    )
    found = []
    for static in (True, False):
        world = World.from_checkpoint(model, tmp_path, settings, device="cuda", static=static)
        replies, stats = [world.reply(PROMPT * 4, 24).tokens for _ in range(2)], world.scheduler.stats()
        assert replies[0] == replies[1]
        assert stats.drafted_at[0] > stats.drafted_at[4] > 0, "several depths were used"
        found.append((replies, stats.drafted_at))
    assert found[0] == found[1]
