"""Tiny GLM-4.7 on a CUDA device: near the CPU in every stored format, and replies that do not depend on how."""

from pathlib import Path

import pytest
import torch

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Prefill
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
PROMPT = [(7 * i + 3) % 512 for i in range(100)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    pytest.importorskip("dgpp_glm")
    return load_plugins(environ={}).model("glm47")


@pytest.fixture(scope="module", params=["bf16", "fp8", "nvfp4"])
def folder(request: pytest.FixtureRequest, model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw, dtype = in_format(model.spec, model.spec.tiny_config, request.param)
    path = tmp_path_factory.mktemp(request.param)
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, path, seed=4, dtype=dtype)
    return path


def test_logprobs_are_near_those_of_the_cpu(model: LoadedModel, folder: Path) -> None:
    first = []
    for device in ("cpu", "cuda"):
        settings = EngineSettings(max_concurrency=4, kv_capacity=2048)
        engine = World.from_checkpoint(model, folder, settings, device=device).engine
        operations = [Begin(0, 0, tuple(PROMPT), GREEDY, 20, (1, 2), 0), Prefill(0, 0, len(PROMPT), True)]
        found = engine.execute(0, operations).slots[0].logprobs
        assert found is not None
        first.append(dict(found[0].top))
    shared = set(first[0]) & set(first[1])
    assert len(shared) >= 10
    assert max(abs(first[0][token] - first[1][token]) for token in shared) < 0.25


@pytest.mark.slow
def test_replies_do_not_depend_on_company_cache_chunks_or_drafts(model: LoadedModel, folder: Path) -> None:
    source = torch.Generator().manual_seed(5)
    prompts = [torch.randint(512, (n,), generator=source).tolist() for n in (70, 5, 33, 16, 48, 1, 97, 64)]

    def make(settings: EngineSettings, lag: int, ranks: int) -> World:
        return World.from_checkpoint(model, folder, settings, lag=lag, device="cuda")

    axes = Axes(depths=(0, 1, 3), chunks=(16, 0), lags=(0, 1), max_tokens=24)
    report = exactness_matrix(make, prompts, axes)
    assert not report.differences
    assert report.hits
