"""Worlds of several ranks in one process: the replies of one rank, the same bits on each, and no rank left waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.api import CheckpointError, DgppError, EngineError, PlanError
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.engine.operations import Operation
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.scheduler.stepper import Pending
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World

SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16)
PROMPT = tuple((7 * i + 3) % 512 for i in range(50))


@pytest.fixture(scope="module")
def four() -> LoadedModel:
    """A tiny Llama with a key/value head for each of four ranks."""
    pytest.importorskip("dgpp_llama")
    loaded = load_plugins(environ={}).model("smollm2")
    raw = dict(loaded.spec.tiny_config) | {"num_key_value_heads": 4}
    return LoadedModel(msgspec.structs.replace(loaded.spec, tiny_config=raw), loaded.hooks)


@pytest.fixture(scope="module")
def folder(four: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(four, tmp_path_factory.mktemp("four"))


def written(model: LoadedModel, path: Path, **changes: int) -> Path:
    raw = dict(model.spec.tiny_config) | changes
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, path, seed=4, dtype="F32")
    return path


def make(model: LoadedModel, folder: Path, settings: EngineSettings, lag: int, ranks: int) -> World:
    """One rank goes through the same machinery here."""
    return TensorParallelWorld.load(model, folder, settings, ranks, lag=lag)


def test_the_matrix_over_one_two_and_four_ranks(four: LoadedModel, folder: Path) -> None:
    prompts = [PROMPT[:n] for n in (37, 5, 50, 16)]
    axes = Axes(worlds=(1, 2, 4), chunks=(16,), lags=(0, 1), company=(0, 3), max_tokens=10)
    report = exactness_matrix(lambda *each: make(four, folder, *each), prompts, axes)
    assert not report.differences
    assert report.compared == 3 * 2 * (2 * 2 * (1 + 4) + 6)
    assert report.smallest_gap > 1e-4  # far more than the ranks' sums differ by: see the next test


@pytest.mark.parametrize("ranks", [2, 4])
def test_log_probabilities_differ_by_rounding_alone(four: LoadedModel, folder: Path, ranks: int) -> None:
    alone = World.from_checkpoint(four, folder, SETTINGS).reply(PROMPT, 12, logprobs=20)
    shared = make(four, folder, SETTINGS, 0, ranks).reply(PROMPT, 12, logprobs=20)
    assert alone.tokens == shared.tokens
    for one, other in zip(alone.logprobs, shared.logprobs, strict=True):
        assert all(abs(dict(other.top)[token] - logprob) < 1e-5 for token, logprob in one.top[:10])


def test_each_rank_holds_its_share(four: LoadedModel, folder: Path) -> None:
    whole = World.from_checkpoint(four, folder, SETTINGS).engine
    world = TensorParallelWorld.load(four, folder, SETTINGS, 4)
    assert [rank.engine.state.bytes * 4 for rank in world.ranks] == [whole.state.bytes] * 4


class Faulty:
    """An engine that fails in its fourth tick, after its first collective."""

    def __init__(self, world: TensorParallelWorld, rank: int) -> None:
        self.engine, self.bus, self.ticks = world.ranks[rank].engine, world.loopback.buses[rank], 0

    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        self.ticks += 1
        if self.ticks == 4:
            self.bus.barrier()
            raise MemoryError("no room for the logits")
        return self.engine.launch(tick, operations)


def test_a_rank_that_fails_ends_the_world_at_once(four: LoadedModel, folder: Path) -> None:
    world = TensorParallelWorld.load(four, folder, SETTINGS, 4)
    world.ranks[2].engine = Faulty(world, 2)  # type: ignore[assignment]
    world.submit(PROMPT, 20)
    start = time.monotonic()
    with pytest.raises(EngineError, match="different collectives") as refused:
        world.run()
    assert time.monotonic() - start < 10
    assert "rank 2: collective 12, barrier" in refused.value.found
    with pytest.raises(EngineError, match="different collectives"):
        world.tick()


def test_ranks_that_compute_something_else_are_caught_in_that_tick(four: LoadedModel, folder: Path) -> None:
    """The smallest step of one weight that is not cut, on one rank: the others' sums no longer fit its own."""
    world = TensorParallelWorld.load(four, folder, SETTINGS, 2)
    norm: torch.Tensor = world.ranks[1].engine.model.norm  # type: ignore[attr-defined]
    with torch.inference_mode():
        norm.mul_(1 + 2e-7)
    world.submit(PROMPT, 20, logprobs=5)
    with pytest.raises(EngineError, match="the ranks disagree about a tick's results") as refused:
        world.run()
    assert refused.value.where == "rank 1 of 2"


@pytest.mark.parametrize(
    ("field", "size", "kind", "named"),
    [
        ("num_key_value_heads", 2, PlanError, "2 heads of width 16 in all, 0 heads of width 16 a rank"),
        ("intermediate_size", 98, CheckpointError, "98"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_before_loading(
    four: LoadedModel, tmp_path: Path, field: str, size: int, kind: type[DgppError], named: str
) -> None:
    folder = written(four, tmp_path, **{field: size})
    with pytest.raises(kind, match="among 4 ranks") as refused:
        prepare(four, folder, SETTINGS, world=4)
    assert refused.value.found == named
    if kind is PlanError:
        assert refused.value.expected == "a number of ranks that divides the model: 1, 2"
    assert prepare(four, folder, SETTINGS, world=2).world == 2


def test_a_bus_of_another_world_is_refused(four: LoadedModel, folder: Path) -> None:
    prepared = prepare(four, folder, SETTINGS, world=2)
    for bus in (None, LoopbackWorld(4).buses[0]):
        with pytest.raises(EngineError, match="another number of ranks"):
            build_engine(prepared, torch.device("cpu"), lambda *_: None, bus)
