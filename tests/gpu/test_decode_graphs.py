"""Captured decode graphs on a CUDA device: the same tokens as eager steps, and nothing compiled once they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.families import GRAPHS, family_sizes
from dgpp_core.engine.graphs import StaticRunner
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release
from dgpp_core.engine.pending import Pending
from dgpp_core.engine.rehearsal import rehearse, warm
from dgpp_core.engine.transfer import KEPT_STEPS, Post
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.world import Reply, World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
LENGTHS = (5, 33, 64, 41, 1, 100)
PROMPTS = [torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def settings(depth: int) -> EngineSettings:
    drafting = {"mtp_depth": depth} if depth else {"mtp": False}
    return EngineSettings(max_concurrency=6, kv_capacity=4096, prefix_cache_gib=0.01, **drafting)


def world(made: tuple[LoadedModel, Path], depth: int, *, static: bool, lag: int = 1) -> World:
    return World.from_checkpoint(*made, settings(depth), lag=lag, device="cuda", static=static)


def uncaptured(made: tuple[LoadedModel, Path], depth: int) -> World:
    """The same buffers and families, their kernels launched one by one."""
    which = world(made, depth, static=False)
    assert list(which.engine.use_graphs(capture=False)) == []
    return which


@pytest.fixture(scope="module")
def made(toy: LoadedModel, toy_checkpoint: Path) -> tuple[LoadedModel, Path]:
    return toy, toy_checkpoint


@pytest.fixture(scope="module")
def glm47(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    """A small one in NVFP4: all of its layers have kernels."""
    pytest.importorskip("dgpp_glm")
    model, folder = load_plugins(environ={}).model("glm47"), tmp_path_factory.mktemp("glm47")
    raw = in_format(model.spec, model.spec.tiny_config, "nvfp4")[0]
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4)
    return model, folder


def replies(which: World, params: SamplingParams, company: int) -> list[Reply]:
    """What the first ``company`` prompts get when they run together."""
    requests = [which.submit(prompt, 40, params=params, use_cache=False) for prompt in PROMPTS[:company]]
    done = which.run()
    return [done[request] for request in requests]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_captured_and_launched_steps_give_the_same_tokens(
    made: tuple[LoadedModel, Path], depth: int, params: SamplingParams
) -> None:
    graphs, eager = world(made, depth, static=True), uncaptured(made, depth)
    for company in (1, 2, 5, 6):
        found, expected = replies(graphs, params, company), replies(eager, params, company)
        assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
        assert all(len(reply.tokens) == 40 for reply in found)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(
    "params",
    [SAMPLED, SamplingParams(seed=9), SamplingParams(temperature=1.2, top_k=20, min_p=0.01, seed=(1 << 64) - 5)],
    ids=["top_p", "plain", "top_k"],
)
def test_the_device_samples_what_the_host_samples(
    made: tuple[LoadedModel, Path], depth: int, params: SamplingParams
) -> None:
    device, host = world(made, depth, static=True), world(made, depth, static=True)
    assert device.engine.program.samples
    host.engine.program.samples = False
    found, expected = replies(device, params, 5), replies(host, params, 5)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_glm47_is_exact_with_graphs_drafts_company_and_pipelining(tmp_path: Path, form: str) -> None:
    """Against each prompt alone, undrafted and without graphs."""
    pytest.importorskip("dgpp_glm")
    model = load_plugins(environ={}).model("glm47")
    raw = in_format(model.spec, model.spec.tiny_config, form)[0]
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4)

    def make(wanted: EngineSettings, lag: int, ranks: int) -> World:
        oracle = not wanted.mtp and wanted.prefill_budget_tokens == 0 and wanted.prefix_cache_gib == 0.0
        return World.from_checkpoint(model, tmp_path, wanted, lag=lag, device="cuda", static=not oracle)

    axes = Axes(chunks=(16, 0), depths=(0, 1, 3), lags=(0, 1), company=(0, 2, 5), max_tokens=32)
    report = exactness_matrix(make, PROMPTS, axes)
    assert not report.differences, report.differences[:3]
    assert report.hits


def test_a_pipelined_world_gives_the_replies_of_one_that_waits(made: tuple[LoadedModel, Path]) -> None:
    ahead, waiting = world(made, 1, static=True, lag=1), world(made, 1, static=True, lag=0)
    assert [r.tokens for r in replies(ahead, GREEDY, 4)] == [r.tokens for r in replies(waiting, GREEDY, 4)]


def test_a_launch_does_not_wait_for_the_device(made: tuple[LoadedModel, Path]) -> None:
    engine = world(made, 0, static=True).engine
    engine.execute(0, [Begin(0, 0, (1, 2, 3), GREEDY, -1, (1,), 0), Prefill(0, 0, 3, True), Decode((0,), 0)])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    pending = engine.launch(1, [Decode((0,), 0)])
    blocked = torch.cuda.Event()  # type: ignore[no-untyped-call]
    blocked.record()
    assert not blocked.query(), "the launch returned after the device was done"  # type: ignore[no-untyped-call]
    assert len(pending.wait().slots[0].tokens) == 1
    engine.execute(2, [Release(0)])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompts_and_steps_are_launched_without_waiting(
    glm47: tuple[LoadedModel, Path], depth: int, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever would make the host wait for the device is an error while operations are launched."""
    which = world(glm47, depth, static=True)
    wanted, launch = replies(which, params, 3), which.engine.launch

    def watched(tick: int, operations: Sequence[Operation]) -> Pending:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(tick, operations)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(which.engine, "launch", watched)
    assert [reply.tokens for reply in replies(which, params, 3)] == [reply.tokens for reply in wanted]


@pytest.mark.parametrize("depth", [0, 1])
def test_results_that_nobody_has_read_are_not_overwritten(made: tuple[LoadedModel, Path], depth: int) -> None:
    """More steps are launched than an outbox holds, and read when all are done."""
    unread, steps = world(made, depth, static=True).engine, 2 * KEPT_STEPS + 1
    reading = world(made, depth, static=True).engine
    begin = [Begin(0, 0, (1, 2, 3), GREEDY, -1, (1,), 0), Prefill(0, 0, 3, True)]
    wanted = [reading.execute(0, begin)] + [reading.execute(1 + n, [Decode((0,), depth)]) for n in range(steps)]
    pending = [unread.launch(0, begin)] + [unread.launch(1 + n, [Decode((0,), depth)]) for n in range(steps)]
    assert [late.wait().slots[0].tokens for late in pending] == [each.slots[0].tokens for each in wanted]


def test_results_of_another_step_are_refused(made: tuple[LoadedModel, Path]) -> None:
    engine = world(made, 0, static=True).engine
    engine.execute(0, [Begin(0, 0, (1, 2, 3), GREEDY, -1, (1,), 0), Prefill(0, 0, 3, True)])
    pending = engine.launch(1, [Decode((0,), 0)])
    incoming = pending.parts[0].download
    assert isinstance(incoming, Post)
    torch.cuda.synchronize()
    with torch.inference_mode():
        incoming._rows += 1
    with pytest.raises(EngineError, match="not in their place"):
        pending.wait()


def test_a_family_has_as_many_graphs_as_are_planned(made: tuple[LoadedModel, Path]) -> None:
    runner = world(made, 1, static=True).engine.runner
    assert isinstance(runner, StaticRunner)
    assert [len(family._graphs) for family in runner._families.values()] == [GRAPHS] * len(family_sizes(6))


def test_nothing_is_compiled_after_warming(made: tuple[LoadedModel, Path]) -> None:
    counter = CompileCounter()
    counter.install()
    which = world(made, 1, static=True)
    warm(which.engine, 256)
    rehearse(which.engine, 256, which.engine.vocab_size)
    before = list(counter.names)
    for company in range(1, 7):
        replies(which, GREEDY, company)
        replies(which, SAMPLED, company)
    assert counter.names == before


def test_a_capture_that_fails_names_its_family(made: tuple[LoadedModel, Path]) -> None:
    engine = world(made, 0, static=False).engine
    forward = engine.model.forward

    def reading(batch, state):  # type: ignore[no-untyped-def]
        int(batch.lengths[0])
        return forward(batch, state)

    engine.model.forward = reading  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="cannot be captured") as error:
        list(engine.use_graphs())
    assert error.value.where == "6 requests of 1 rows"
