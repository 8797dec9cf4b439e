"""A model set up to be measured: from a checkpoint, or with random weights made on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import Bus, ModelConfig
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare, prepare_config
from dgpp_core.engine.memory import LinuxMemory
from dgpp_core.engine.plan import Plan, make_plan
from dgpp_core.engine.rehearsal import warm
from dgpp_core.engine.runner import EagerRunner
from dgpp_core.formats.resident import DeviceKind
from dgpp_core.host.loading import LoadedModel
from dgpp_core.scheduler.sizing import limits_from, step_depths
from dgpp_core.testing.random_weights import RandomWeights
from dgpp_core.testing.world import World

Judge = Callable[[torch.Tensor, int], torch.Tensor]
"""See `dgpp_core.engine.program.DecodeProgram.judge`."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes on the device: the plan's total, the most that torch held, and what the whole device has taken now."""

    planned: int
    peak_tensors: int
    peak_reserved: int
    device_used: int


class Subject:
    """A model ready to be measured.

    Args:
        source: the folder of a checkpoint, or the config of a model with random weights.
        bus: how this rank meets the others of a model that several share; all are made and driven alike.
        judge: decides how many drafts stand in place of the picks; replies are then no longer the model's.

    Attributes:
        compiles: kernels made ready, of which there should be no more once this is built.
    """

    def __init__(
        self,
        model: LoadedModel,
        source: Path | ModelConfig,
        settings: EngineSettings,
        device: torch.device,
        *,
        bus: Bus | None = None,
        judge: Judge | None = None,
    ) -> None:
        rank, world = (bus.rank, bus.world) if bus else (0, 1)
        kind: DeviceKind = "cpu" if device.type == "cpu" else "cuda"
        settings = settings.on_device(gpu=kind == "cuda")
        self.compiles, self.device, self.settings = CompileCounter(), device, settings
        if kind == "cuda":
            self.compiles.install()
        if isinstance(source, Path):
            prepared = prepare(model, source, settings, kind, world=world)
        else:
            prepared = prepare_config(model, source, settings, kind, world=world)
        config = prepared.config
        extra = model.plan_terms(config, world, msgspec.to_builtins(settings))
        self.plan: Plan = make_plan(
            table=prepared.table, groups=prepared.groups, config=config, settings=settings, world=world,
            device_kind=kind, step_width=prepared.geometry.step_width, extra=extra, available=_available(device),
        )  # fmt: skip
        self.plan.require()
        dtype = torch.float32 if kind == "cpu" else torch.bfloat16
        weights = None
        if not isinstance(source, Path):
            weights = RandomWeights(prepared.table, device, dtype, rank=rank, world=world)
        engine = build_engine(prepared, device, lambda stage, done, total: None, bus, weights=weights)
        engine.program.judge = judge
        self._make_ready(engine)
        limits = limits_from(
            prepared.geometry, settings, engine.needs_snapshot,
            decode_rows_match_prefill=engine.decode_rows_match_prefill, confident=engine.confident,
        )  # fmt: skip
        self.world = World(engine, limits, lag=int(settings.pipeline and kind == "cuda" and not limits.reads_first))

    def memory(self) -> Memory | None:
        """Where there is a GPU."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        peak, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return Memory(self.plan.total, peak, reserved, total - free)

    def _make_ready(self, engine: Engine) -> None:
        if self.device.type == "cuda":
            if self.settings.decode_graph:
                for _ in engine.use_graphs(step_depths(engine.geometry, self.settings)):
                    pass
            warm(engine, self.settings.idle_budget or engine.geometry.context)
            with without_graphs(engine):  # as the reads of a step are recorded
                warm(engine, 1)


@contextlib.contextmanager
def without_graphs(engine: Engine) -> Iterator[None]:
    """Steps run in the shape they come in meanwhile: a graph's replay calls nothing that could be watched."""
    runner = engine.runner
    engine.runner = EagerRunner(engine.program, engine.device)
    try:
        yield
    finally:
        engine.runner = runner


def _available(device: torch.device) -> int:
    return LinuxMemory().available() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
