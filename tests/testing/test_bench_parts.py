"""The parts a benchmark is made of: random weights, bytes counted from the routing, forced acceptance."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from dgpp_core.api import CheckpointError, ConfigError, ModelConfig
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.forced_drafts import ForcedAcceptance
from dgpp_core.testing.inspect import resident_tensor_bytes
from dgpp_core.testing.random_weights import RandomWeights
from dgpp_core.testing.subject import Subject
from dgpp_core.testing.traffic import mean_chosen, read_bytes, recorded_reads

CPU = torch.device("cpu")
SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, prefix_cache_gib=0.0)


@pytest.fixture(scope="module")
def glm() -> LoadedModel:
    pytest.importorskip("dgpp_glm")
    return load_plugins(environ={}).model("glm47")


def config(glm: LoadedModel, form: str) -> ModelConfig:
    return glm.read_config(in_format(glm.spec, glm.spec.tiny_config, form)[0])


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_random_weights_repeat_and_no_two_matrices_are_alike(glm: LoadedModel, form: str) -> None:
    table = glm.bindings(config(glm, form))
    targets = list(dict.fromkeys(binding.target for binding in table.tensors))
    first, again = (RandomWeights(table, CPU, torch.float32) for _ in range(2))
    stored: set[bytes] = set()
    for target in targets:
        binding = next(b for b in table.tensors if b.target == target)
        if binding.role != "linear":
            assert torch.equal(first.take(target), again.take(target))
            continue
        one, two = first.matrix(target), again.matrix(target)
        assert one.shape[0] == sum(b.shape[0] for b in table.tensors if b.target == target)
        assert torch.equal(one.dequantise(), two.dequantise())
        stored.add(one.dequantise().numpy().tobytes())
        assert 0.5 < float(one.dequantise().std()) / binding.init.std < 2
    assert len(stored) == sum(any(b.target == t and b.role == "linear" for b in table.tensors) for t in targets)
    first.finish()
    with pytest.raises(CheckpointError, match="never took the parameter embed"):
        RandomWeights(table, CPU, torch.float32).finish()


def test_a_steps_bytes_are_those_of_its_products_and_of_the_experts_that_were_chosen(glm: LoadedModel) -> None:
    engine = Subject(glm, config(glm, "bf16"), SETTINGS, CPU).world.engine
    layer, head = engine.model.layers[-1], engine.model.head  # type: ignore[attr-defined]
    x = torch.randn(2, glm.spec.tiny_config["hidden_size"], generator=torch.Generator().manual_seed(4))
    with recorded_reads() as reads:
        routing = layer.mlp.router(x)
        layer.mlp.experts(x, routing)
        head.wide(x)
        head(x)
    head(x)
    assert [read.operation for read in reads] == [layer.mlp.router, layer.mlp.experts, head, head]
    chosen, entries = len(set(routing.ids.flatten().tolist())), layer.mlp.experts.experts + 1
    assert chosen < entries - 1
    assert mean_chosen(reads) == chosen
    of_experts = resident_tensor_bytes(layer.mlp.experts) * (chosen + 1) // entries
    others = resident_tensor_bytes(layer.mlp.router) + 2 * resident_tensor_bytes(head)
    assert read_bytes(reads) == of_experts + others


def test_a_draft_layer_reads_the_head_again(glm: LoadedModel) -> None:
    drafting = msgspec.structs.replace(SETTINGS, mtp_depth=2)
    world = Subject(glm, config(glm, "bf16"), drafting, CPU).world
    world.submit([1, 2, 3], 20)
    world.tick()
    with recorded_reads() as reads:
        world.tick()
    head = world.engine.model.head  # type: ignore[attr-defined]
    assert sum(read.operation is head for read in reads) == 3, "one for the step and one for each draft"


@pytest.mark.parametrize(("rate", "depth"), [(0.8, 1), (0.5, 3), (0.0, 2), (1.0, 4)])
def test_first_drafts_stand_at_the_rate_that_was_asked_for(rate: float, depth: int) -> None:
    judge, length, first, steps = ForcedAcceptance(rate), torch.tensor([10]), 0, 2000
    for _ in range(steps):
        accepted = int(judge(length, depth)[0])
        first += accepted > 0
        length = length + 1 + accepted
        assert 0 <= accepted <= depth
    assert first / steps == pytest.approx(rate, abs=0.04)
    lengths = torch.arange(0, 4000, 7)
    assert torch.equal(judge(lengths, depth), judge.stand(lengths, depth))


@pytest.mark.parametrize("rate", [math.nan, -0.1, 1.1, math.inf])
def test_a_rate_that_is_no_share(rate: float) -> None:
    with pytest.raises(ConfigError, match="no share of drafts"):
        ForcedAcceptance(rate)
