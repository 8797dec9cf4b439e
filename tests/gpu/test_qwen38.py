"""Tiny Qwen3.8-Flash-Next on a CUDA device, its layers as torch operations: near the CPU in every format."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Prefill
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.testing import TensorParallelWorld, World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
PROMPT = [(7 * i + 3) % 512 for i in range(18)]
"""So short that every block of keys is seen: a choice that rounding turns would be a difference of another kind."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    pytest.importorskip("dgpp_qwen")
    return load_plugins(environ={}).model("qwen38-flash-next")


@pytest.mark.parametrize(
    ("fmt", "dense"), [("bf16", "checkpoint"), ("fp8", "checkpoint"), ("nvfp4", "checkpoint"), ("nvfp4", "fp8")]
)
def test_logprobs_are_near_those_of_the_cpu(
    model: LoadedModel, fmt: str, dense: Literal["checkpoint", "fp8"], tmp_path: Path
) -> None:
    raw, dtype = in_format(model.spec, model.spec.tiny_config, fmt)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype=dtype)
    first = []
    for device in ("cpu", "cuda"):
        settings = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=2, dense_weights=dense)
        engine = World.from_checkpoint(model, tmp_path, settings, device=device).engine
        begin, prefill = Begin(0, 0, tuple(PROMPT), GREEDY, 20, (1, 2), 0), Prefill(0, 0, len(PROMPT), True)
        found = engine.execute(0, [begin, prefill]).slots[0].logprobs
        assert found is not None
        first.append(dict(found[0].top))
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 10
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.5


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_ranks_agree_to_the_bit_and_are_near_one(model: LoadedModel, fmt: str, ranks: int, tmp_path: Path) -> None:
    """All on one device, drafting; the world compares what the ranks compute in every tick."""
    raw, dtype = in_format(model.spec, model.spec.tiny_config, fmt)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype=dtype)
    settings = EngineSettings(max_concurrency=4, kv_capacity=2048, mtp=True, mtp_depth=4)
    one = World.from_checkpoint(model, tmp_path, settings, device="cuda").reply(PROMPT, 1, logprobs=20)
    several = TensorParallelWorld.load(model, tmp_path, settings, ranks, device="cuda").reply(PROMPT, 12, logprobs=20)
    assert len(several.tokens) == 12
    first = [dict(reply.logprobs[0].top) for reply in (one, several)]
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 10
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.5
