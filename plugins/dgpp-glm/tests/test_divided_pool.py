"""Latents whose blocks ranks divide give the bits of latents that every rank has."""

from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.api import ConfigError
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.factory import prepare
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld
from dgpp_core.testing.world import Reply

SETTINGS = EngineSettings(
    max_concurrency=3, kv_capacity=144, block_tokens=16, prefill_budget_tokens=24, mtp_depth=2, prefix_min_tokens=0,
    prefix_cache_gib=0.01,
)  # fmt: skip
LENGTHS = (40, 3, 21)


@pytest.fixture(scope="module", params=["glm53", "glm53-flash"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load_plugins(environ={}).model(request.param)


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, raw = tmp_path_factory.mktemp(model.spec.name), model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, path, seed=13, dtype="F32")
    return path


def load(model: LoadedModel, folder: Path, world: int, divided: int, kv_dtype: str) -> TensorParallelWorld:
    changed = {"decode_context_parallel": divided, "kv_dtype": kv_dtype}
    return TensorParallelWorld.load(model, folder, msgspec.structs.replace(SETTINGS, **changed), world)


def replies(world: TensorParallelWorld) -> list[Reply]:
    """Together, then the longest again out of the cache, in a pool that is full twice over."""
    source = torch.Generator().manual_seed(2)
    prompts = [torch.randint(512, (length,), generator=source).tolist() for length in LENGTHS]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.8, seed=number) if number % 2 else GREEDY
        world.submit(prompt, 8, params=params, logprobs=3)
    found = world.run()
    again = [world.reply(prompt, 4, logprobs=3) for prompt in (prompts[0], prompts[2][::-1] * 4, prompts[0])]
    assert again[0].cached
    return [*(found[number] for number in range(len(prompts))), *again]


@pytest.mark.parametrize(("world", "kv_dtype"), [(2, "bf16"), (4, "fp8")])
def test_replies_have_the_bits_of_an_undivided_pool(
    model: LoadedModel, folder: Path, world: int, kv_dtype: str
) -> None:
    whole = load(model, folder, world, 1, kv_dtype)
    expected, pool = replies(whole), whole.engine.state.pools["latent"]
    for divided in [ranks for ranks in (2, 4) if ranks <= world]:
        other = load(model, folder, world, divided, kv_dtype)
        assert replies(other) == expected
        own = other.engine.state.pools["latent"]
        assert own.shape[1] == -(-pool.shape[1] // divided) + 1
        assert own.shape[0] == pool.shape[0]


@pytest.mark.parametrize(("world", "divided"), [(1, 2), (4, 3)])
def test_ranks_that_cannot_divide_the_blocks_are_refused(
    model: LoadedModel, folder: Path, world: int, divided: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, decode_context_parallel=divided)
    with pytest.raises(ConfigError, match="cannot be divided") as refused:
        prepare(model, folder, settings, world=world)
    assert refused.value.where == "engine.decode_context_parallel"


def test_a_model_whose_ranks_keep_rows_of_their_own_has_nothing_to_divide() -> None:
    other = load_plugins(environ={}).model("glm47")
    with pytest.raises(ConfigError, match="no rows that ranks keep alike"):
        other.groups(other.read_config(other.spec.tiny_config), 2, {"decode_context_parallel": 2})
