"""Matrices cut in their stored form: ranks that share a quantised checkpoint reply as one that holds it whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.world import Reply

SETTINGS = EngineSettings(
    max_concurrency=4, kv_capacity=1024, block_tokens=16, prefill_budget_tokens=16, mtp=True, mtp_depth=3
)
LENGTHS = (40, 3, 17, 29)


def replies(world: World) -> list[Reply]:
    source = torch.Generator().manual_seed(2)
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(512, (length,), generator=source).tolist()
        params = SamplingParams(temperature=0.8, seed=number) if number % 2 else GREEDY
        world.submit(tokens, 8, params=params, logprobs=5)
    found = world.run()
    return [found[number] for number in range(len(LENGTHS))]


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_ranks_reply_as_one_does_from_a_quantised_checkpoint(fmt: str, tmp_path: Path) -> None:
    model = load_plugins(environ={}).model("glm47")
    raw = dict(model.spec.tiny_config) | {"quantization_config": model.spec.quantised[fmt]}
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=11)
    alone = replies(World.from_checkpoint(model, tmp_path, SETTINGS))
    assert [len(reply.tokens) for reply in alone] == [8] * len(LENGTHS)
    for ranks in (2, 4):
        for one, other in zip(alone, replies(TensorParallelWorld.load(model, tmp_path, SETTINGS, ranks)), strict=True):
            assert one.tokens == other.tokens
            assert all(
                abs(mine.logprob - theirs.logprob) < 1e-4
                for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
            )
