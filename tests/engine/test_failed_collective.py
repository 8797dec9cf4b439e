"""A collective inside a replayed step fails: the engine says so, whatever the step has left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.call import Call
from dgpp_core.bus.link import connect
from dgpp_core.bus.roster import enter, hello
from dgpp_core.bus.shm.link import FOLDER, SharedMemoryLink
from dgpp_core.bus.slab import Geometry
from dgpp_core.bus.slab_bus import SlabBus
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import World

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no shared memory at {FOLDER}")
SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.0)
PROMPT = tuple(range(1, 21))
SEEDED = SamplingParams(temperature=0.9, seed=3)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5)
"""Picked by the host, before the step is committed."""


class Kernels:
    """Collectives on a device of which one may have given up; nothing is sent, the tensors are a CPU's."""

    given_up: EngineError | None = None

    def all_reduce(self, call: Call, partial: Tensor) -> Tensor:
        raise AssertionError("tensors of a CPU do not come here")

    def all_gather(self, call: Call, part: Tensor) -> list[Tensor]:
        raise AssertionError("tensors of a CPU do not come here")

    def fault(self) -> EngineError | None:
        return self.given_up

    def abort(self, missing: int) -> None:
        """Nobody waits."""

    def finish(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """There is no memory."""


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture
def world(tiny: LoadedModel, checkpoint: Path, kernels: Kernels) -> Iterator[World]:
    link = SharedMemoryLink(0, Geometry(world=1, channels=1, slot_bytes=4096))
    roster = enter(hello(0, 1, "test", ""), "127.0.0.1:0", 5.0)
    connect(roster, link)
    with SlabBus(roster, link, timeout=5.0, device=kernels) as bus:
        yield World.from_checkpoint(tiny, checkpoint, SETTINGS, bus=bus, static=True)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "by the host"])
@pytest.mark.parametrize("left", [torch.nan, 0.5], ids=["nonsense", "plausible"])
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_the_fault_is_the_collectives_and_no_token_of_the_step_counts(
    world: World, kernels: Kernels, params: SamplingParams, left: float, step: str
) -> None:
    engine, fault = world.engine, EngineError("no answer from rank 1 in a collective on the device", where="rank 0")
    begin: list[Operation] = [Begin(0, 7, PROMPT, params, -1, (1, 2), 0), Prefill(0, 0, 20, True)]
    if step == "decode":
        assert len(engine.execute(0, begin).slots[0].tokens) == 1

    def gives_up(hidden: Tensor) -> Tensor:
        kernels.given_up = fault
        return torch.full((len(hidden), engine.vocab_size), left)

    engine.model.logits = gives_up  # type: ignore[method-assign]
    with pytest.raises(EngineError) as raised:
        engine.execute(1, [Decode((0,), 0)] if step == "decode" else begin)
    assert raised.value.line() == fault.line()
    counts = engine.sampler._state(0).counts
    if params is PENALISED:
        assert counts is not None
        assert int(counts.sum()) == len(PROMPT) + (step == "decode")


def test_a_step_that_was_read_before_the_fault_stands(world: World, kernels: Kernels) -> None:
    engine = world.engine
    engine.execute(0, [Begin(0, 7, PROMPT, GREEDY, -1, (1, 2), 0), Prefill(0, 0, 20, True)])
    first, second = engine.launch(1, [Decode((0,), 0)]), engine.launch(2, [Decode((0,), 0)])
    assert len(first.wait().slots) == 1
    kernels.given_up = EngineError("no answer from rank 1")
    assert first.wait().tick == 1
    for _ in range(2):
        with pytest.raises(EngineError, match="no answer from rank 1"):
            second.wait()
