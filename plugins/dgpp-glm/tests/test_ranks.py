"""Ranks that share stored matrices, or the embedding, reply as one rank does that holds them whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.api import ConfigError
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.inspect import resident_tensor_bytes
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


def test_an_embedding_that_ranks_divide_changes_no_bit_of_a_reply(tmp_path: Path) -> None:
    model = load_plugins(environ={}).model("glm53")
    raw = dict(model.spec.tiny_config)
    config = model.read_config(raw)
    synthesise(model.spec, model.bindings(config), raw, tmp_path, seed=11)
    divided = msgspec.structs.replace(SETTINGS, embed_sharding="vocab")
    alone = replies(World.from_checkpoint(model, tmp_path, divided))
    whole, world = (TensorParallelWorld.load(model, tmp_path, s, 2) for s in (SETTINGS, divided))
    found = replies(world)
    assert found == replies(whole)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in alone]
    sizes = [resident_tensor_bytes(w.engine.model, w.engine.drafter) for w in (whole, world)]
    assert sizes[0] - sizes[1] == 4 * 512 * 128 // 2


def test_the_released_embedding_is_planned_divided() -> None:
    model = load_plugins(environ={}).model("glm53")
    table = model.bindings(model.read_config(model.spec.full_config))
    held = parameters(table.for_serving(drafting=True, divided=True), 4)["embed"]
    assert held.bytes("cuda") == 2 * 154880 // 4 * 6144


def test_a_model_that_cannot_divide_its_embedding_says_so() -> None:
    model = load_plugins(environ={}).model("glm47")
    table = model.bindings(model.read_config(model.spec.tiny_config))
    with pytest.raises(ConfigError, match=r"engine\.embed_sharding"):
        table.for_serving(drafting=True, divided=True)
