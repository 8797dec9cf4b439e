"""The same engine on a CUDA device: torch operations in bfloat16, without the row-exactness promise of the CPU path."""

from pathlib import Path

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Prefill
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
PROMPT = [(7 * i + 3) % 512 for i in range(100)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    pytest.importorskip("dgpp_llama")
    model, folder = load_plugins(environ={}).model("smollm2"), tmp_path_factory.mktemp("tiny")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4)
    return model, folder


def world(made: tuple[LoadedModel, Path], device: str) -> World:
    return World.from_checkpoint(*made, EngineSettings(max_concurrency=4, kv_capacity=2048), device=device)


def test_logprobs_are_near_those_of_the_cpu(made: tuple[LoadedModel, Path]) -> None:
    first = []
    for device in ("cpu", "cuda"):
        engine = world(made, device).engine
        operations = [Begin(0, 0, tuple(PROMPT), GREEDY, 20, (1, 2), 0), Prefill(0, 0, len(PROMPT), True)]
        found = engine.execute(0, operations).slots[0].logprobs
        assert found is not None
        first.append(dict(found[0].top))
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 15
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.05


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
def test_a_reply_repeats_with_and_without_its_prefix_cached(
    made: tuple[LoadedModel, Path], params: SamplingParams
) -> None:
    on_device = world(made, "cuda")
    cold = on_device.reply(PROMPT, 32, params=params)
    again = world(made, "cuda").reply(PROMPT, 32, params=params)
    assert cold.tokens == again.tokens
    assert len(cold.tokens) == 32
    assert on_device.reply(PROMPT, 32, params=params).cached == 64
