"""Ranks as processes over NCCL: the bits of the loopback bus, eager and captured into a CUDA graph."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from dgpp_core.bus.fold import PAYLOADS, fold
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins

sys.path.insert(0, str(Path(__file__).parents[1] / "bus"))  # new processes are given this path
import programs

COUNT = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
several = pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices; {COUNT} here")
WORLDS = [pytest.param(n, marks=pytest.mark.skipif(n > COUNT, reason=f"needs {n} CUDA devices")) for n in (2, 4)]
run = functools.partial(programs.run, context=multiprocessing.get_context("spawn"), device="cuda", timeout=60.0)


@pytest.mark.skipif(COUNT < 1, reason="needs a CUDA device; none is available here")
@pytest.mark.parametrize("dtype", PAYLOADS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_device_folds_to_the_bits_of_the_host(world: int, dtype: torch.dtype) -> None:
    parts = [programs.values(rank, (64, 1031), dtype) for rank in range(world)]
    expected, found = fold(parts), fold([part.cuda() for part in parts]).cpu()
    number = ~expected.isnan()
    size = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(size)[number], expected.view(size)[number])
    assert torch.equal(found.isnan(), ~number)


@several
@pytest.mark.parametrize("world", WORLDS)
def test_results_are_those_of_the_loopback_bus_bit_for_bit(world: int) -> None:
    program = functools.partial(programs.battery, device="cuda")
    assert run(program, world) == LoopbackWorld(world).run(program)


@several
@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_collective_is_the_eager_one(world: int) -> None:
    assert run(functools.partial(programs.captured, 200), world) == [""] * world


@several
def test_ranks_that_issue_something_else_are_named_at_the_next_barrier() -> None:
    for line in run(programs.device_calls_differ, 2):
        assert "the ranks issued different collectives on their devices; where: rank 1" in line


@several
@pytest.mark.parametrize("static", [False, True])
def test_engines_on_two_devices_reply_the_same(tmp_path: Path, static: bool) -> None:
    """With decode steps run as they come, and from captured graphs with the collectives inside."""
    pytest.importorskip("dgpp_llama")
    model = load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4)
    first, second = run(functools.partial(programs.replies, tmp_path, "cuda", static), 2)
    assert first == second
    assert [len(reply.tokens) for reply in first] == [16] * 4
    eager = run(functools.partial(programs.replies, tmp_path, "cuda", False), 2)[0]
    assert [reply.tokens for reply in first] == [reply.tokens for reply in eager]
