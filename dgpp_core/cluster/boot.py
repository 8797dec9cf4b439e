"""From what is to be served to an engine that is ready, on any rank: plan, load, capture, rehearse."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import Bus, ModelConfig
from dgpp_core.checkpoint.config_json import CONFIG
from dgpp_core.checkpoint.image import ImageCache
from dgpp_core.cluster.identity import Terms
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.rank import Served
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import Prepared, Progress, build_engine, pick_device, prepare
from dgpp_core.engine.memory import LinuxMemory, check_floor
from dgpp_core.engine.plan import Plan, make_plan
from dgpp_core.engine.rehearsal import rehearse, warm
from dgpp_core.formats.resident import DeviceKind
from dgpp_core.host.loading import LoadedModel
from dgpp_core.scheduler.sizing import idle_schedule, limits_from, step_depths
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.tokenizer import Tokenizer

_log = logging.getLogger("dgpp.cluster")

Connect = Callable[[torch.device], Bus | None]
"""Meets the other ranks on a device; None for a world of one. Called when everything cheap has been checked."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a rank is to serve.

    Attributes:
        image_cache: the folder of resident images; empty for none.
        here: ranks on this host, which share its processors and its memory, and take its GPUs in order.
    """

    model: LoadedModel
    checkpoint: Path
    device: str
    settings: EngineSettings
    image_cache: str = ""
    rank: int = 0
    world: int = 1
    here: int = 1


class Built(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An engine that could serve.

    Attributes:
        exact: whether the rehearsal found every row's bits independent of its neighbours.
        constrained: whether replies can be held to grammars.
    """

    prepared: Prepared
    engine: Engine
    served: Served
    plan: Plan
    compiles: CompileCounter
    exact: bool
    constrained: bool

    def terms(self) -> Terms:
        """What other ranks must have in common with this one."""
        return Terms(
            checkpoint=_checkpoint_digest(self.prepared),
            device=self.engine.device.type,
            dtype=str(_dtype(self.engine.device)),
            limits=msgspec.json.encode(self.served.limits).decode(),
            lag=self.served.lag,
            grammars=self.constrained,
            rehearsal=self.exact,
        )


def build(what: Assignment, connect: Connect, report: Progress, pulse: Pulse) -> Built:
    """Plan, load and rehearse; every rank of a world does so at the same time.

    Args:
        report: called with a stage, and bytes done and in all where they are known.
        pulse: learns from the rehearsal how long the loop may be at one thing.

    Raises:
        DgppError: whatever keeps this rank from serving.
    """
    device = device_of(what)
    kind: DeviceKind = "cpu" if device.type == "cpu" else "cuda"
    settings = what.settings.on_device(gpu=kind == "cuda")
    prepared = prepare(what.model, what.checkpoint, settings, kind, world=what.world)
    plan = _plan(what, prepared, settings, device)
    plan.require()
    compiles = CompileCounter()
    if kind == "cuda":
        torch.cuda.set_device(device)
        compiles.install()
    bus = connect(device)
    guarded = _guarded(report, plan.headroom // 2)
    with ThreadPoolExecutor(1) as beside:
        vocabulary = beside.submit(_vocabulary, what.checkpoint, prepared.config)
        engine = build_engine(prepared, device, guarded, bus, images=_images(what, settings, kind))
    if (tokens := vocabulary.result()) is not None:
        engine.offer_grammars(tokens)
    exact = _make_ready(engine, settings, report, pulse)
    served = served_by(engine, settings)
    if not what.rank:  # one voice: it is the same on every rank
        for key, why in idle_schedule(settings, served.limits).items():
            _log.warning("engine.%s has no effect: %s", key, why)
    return Built(
        prepared=prepared,
        engine=engine,
        served=served,
        plan=plan,
        compiles=compiles,
        exact=exact,
        constrained=tokens is not None,
    )


def served_by(engine: Engine, settings: EngineSettings) -> Served:
    """What a loop drives, of an engine."""
    limits = limits_from(
        engine.geometry,
        settings,
        engine.needs_snapshot,
        decode_rows_match_prefill=engine.decode_rows_match_prefill,
        confident=engine.confident,
    )
    return Served(
        executor=engine,
        limits=limits,
        lag=int(settings.pipeline and engine.device.type == "cuda" and not limits.reads_first),
        vocab_size=engine.vocab_size,
        compile_grammar=lambda grammar: engine.constraints.compile(grammar),
        gather=settings.admission_gather_ms / 1e3,
        look=engine.look,
    )


def set_threads(here: int = 1) -> None:
    """Let torch compute with the processors that this process may use, divided among the ranks of this host."""
    if not os.environ.get("OMP_NUM_THREADS"):  # torch has followed that already; its own default ignores the affinity
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))


def device_of(what: Assignment) -> torch.device:
    """The rank's device: its own GPU where several ranks of this host may choose among several.

    Raises:
        ConfigError: there is no such device.
    """
    return pick_device(f"cuda:{what.rank}" if _chooses(what) else what.device)


def shares_device(what: Assignment) -> bool:
    """Whether the ranks of this host compute on one GPU."""
    return what.here > 1 and what.device != "cpu" and not _chooses(what)


def _chooses(what: Assignment) -> bool:
    return what.here > 1 and (what.device == "cuda" or (what.device == "auto" and torch.cuda.is_available()))


def _plan(what: Assignment, prepared: Prepared, settings: EngineSettings, device: torch.device) -> Plan:
    return make_plan(
        table=what.model.bindings(prepared.config),
        groups=prepared.groups,
        config=prepared.config,
        settings=settings,
        world=what.world,
        device_kind="cpu" if device.type == "cpu" else "cuda",
        step_width=prepared.geometry.step_width,
        extra=what.model.plan_terms(prepared.config, what.world, msgspec.to_builtins(settings)),
        available=LinuxMemory().available() // what.here
        if device.type == "cpu"
        else torch.cuda.mem_get_info(device)[0],
    )


def _make_ready(engine: Engine, settings: EngineSettings, report: Progress, pulse: Pulse) -> bool:
    """Capture, compile and rehearse what will be served; whether rows are independent of their neighbours."""
    chunk = min(settings.idle_budget or engine.geometry.context, engine.geometry.context)
    if engine.device.type == "cuda":
        if settings.decode_graph:
            for family in engine.use_graphs(step_depths(engine.geometry, settings)):
                report(f"graph: {family}", 0, 0)
        report("kernels", 0, 0)
        warm(engine, chunk)
    report("rehearsal", 0, 0)
    with pulse.during("working"):
        return rehearse(engine, chunk, engine.vocab_size)


def _vocabulary(checkpoint: Path, config: ModelConfig) -> Vocabulary | None:
    """What grammars are made of; None where the checkpoint has no tokenizer or no token that ends a reply."""
    if not config.eos_ids or not (checkpoint / "tokenizer.json").is_file():
        return None
    return Vocabulary.of(Tokenizer.load(checkpoint), config.vocab_size, config.eos_ids[0])


def _images(what: Assignment, settings: EngineSettings, kind: DeviceKind) -> ImageCache | None:
    """Where resident images are kept: of GPUs, since a CPU packs weights into a form that no file can hold."""
    if kind == "cpu" or not what.image_cache:
        return None
    return ImageCache(Path(what.image_cache), f"bf16_weights {settings.bf16_weights}")


def _guarded(report: Progress, floor: int) -> Progress:
    """Stop while loading before the machine starts to swap."""
    memory = LinuxMemory()

    def guarded(stage: str, done: int, total: int) -> None:
        check_floor(memory, floor, f"loading {stage}")
        report(stage, done, total)

    return guarded


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _checkpoint_digest(prepared: Prepared) -> str:
    """Over config.json and what the headers say of every tensor, wherever the files are."""
    entries = sorted(prepared.entries.values(), key=lambda entry: entry.name)
    state = hashlib.blake2b((entries[0].file.parent / CONFIG).read_bytes() if entries else b"", digest_size=8)
    for entry in entries:
        state.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.file.name}\n".encode())
    return state.hexdigest()
