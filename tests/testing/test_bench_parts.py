"""The parts a benchmark is made of: random weights, bytes counted from the routing, forced acceptance."""

from __future__ import annotations

import pytest
import torch

from dgpp_core.api import CheckpointError, ModelConfig
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.ops.experts import Experts
from dgpp_core.testing.forced_drafts import ForcedAcceptance
from dgpp_core.testing.inspect import resident_tensor_bytes
from dgpp_core.testing.random_weights import RandomWeights
from dgpp_core.testing.subject import Subject
from dgpp_core.testing.traffic import recorded_routing, weight_bytes

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


def test_a_steps_bytes_are_all_weights_but_the_experts_that_nobody_chose(glm: LoadedModel) -> None:
    engine = Subject(glm, config(glm, "bf16"), SETTINGS, CPU).world.engine
    layers = [layer.mlp.experts for layer in engine.model.layers if hasattr(layer.mlp, "experts")]  # type: ignore[attr-defined]
    entries = layers[0].experts + 1
    a_layer = resident_tensor_bytes(layers[0])
    assert layers
    whole = weight_bytes(engine.model, None, 0, [])
    with recorded_routing() as uses:
        x = torch.randn(3, glm.spec.tiny_config["hidden_size"])
        routing = engine.model.layers[-1].mlp.router(x)  # type: ignore[attr-defined]
        layers[-1](x, routing)
        layers[-1](x, routing)
    assert [use.experts for use in uses] == [layers[-1]] * 2
    chosen = set(routing.ids.flatten().tolist())
    assert 1 < len(chosen) < entries - 1
    unread = a_layer * (entries - 1 - len(chosen)) // entries
    assert weight_bytes(engine.model, None, 100, uses) == whole - unread - 100
    assert Experts.__call__.__name__ == "__call__", "the recording outlived its block"


@pytest.mark.parametrize(("rate", "depth"), [(0.8, 1), (0.5, 3), (0.0, 2), (1.0, 4)])
def test_first_drafts_stand_at_the_rate_that_was_asked_for(rate: float, depth: int) -> None:
    judge, length, first, steps = ForcedAcceptance(rate), torch.tensor([10]), 0, 2000
    for _ in range(steps):
        accepted = int(judge(length, depth)[0])
        first += accepted > 0
        length = length + 1 + accepted
        assert 0 <= accepted <= depth
    assert first / steps == pytest.approx(rate, abs=0.04)
