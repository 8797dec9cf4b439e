"""Ranks that divide the embedding by its rows hold a share of it and the bits of ranks that have it whole."""

from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.inspect import resident_tensor_bytes
from dgpp_core.testing.world import Reply

WHOLE = EngineSettings(
    max_concurrency=3, kv_capacity=512, block_tokens=16, prefill_budget_tokens=16, mtp=True, mtp_depth=5
)
DIVIDED = msgspec.structs.replace(WHOLE, embed_sharding="vocab")


def replies(world: World) -> list[Reply]:
    source = torch.Generator().manual_seed(2)
    for number, length in enumerate((40, 3, 17)):
        tokens = torch.randint(512, (length,), generator=source).tolist()
        params = SamplingParams(temperature=0.8, seed=number) if number == 1 else GREEDY
        world.submit(tokens, 6, params=params, logprobs=5)
    return [world.run()[number] for number in range(3)]


@pytest.mark.parametrize(("form", "ranks"), [("released", 2), ("checkpoint", 4)])
def test_an_embedding_that_ranks_divide_changes_no_bit_of_a_reply(
    served: LoadedModel, form: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(form)
    whole, divided = (TensorParallelWorld.load(served, folder, each, ranks) for each in (WHOLE, DIVIDED))
    assert replies(divided) == replies(whole)
    held = [resident_tensor_bytes(world.engine.model, world.engine.drafter) for world in (whole, divided)]
    assert held[0] - held[1] == 4 * 512 * 64 * (ranks - 1) // ranks


def test_the_released_embedding_is_planned_divided(served: LoadedModel) -> None:
    """0.92 GiB less on each of four ranks."""
    table = served.bindings(served.read_config(served.spec.full_config))
    held = [parameters(table.for_serving(drafting=True, divided=d), 4)["embed"].bytes("cuda") for d in (False, True)]
    assert held == [2 * 129280 * 5120, 2 * 129280 * 5120 // 4]
    assert round((held[0] - held[1]) / 2**30, 2) == 0.92
