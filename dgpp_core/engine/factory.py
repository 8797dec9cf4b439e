"""From a checkpoint folder to an engine that can execute operations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch

from dgpp_core.api import (
    BindingTable,
    Bus,
    ConfigError,
    Drafter,
    EngineError,
    Model,
    ModelConfig,
    Rows,
    Shard,
    StateGroup,
    Vision,
    Weights,
    for_device,
)
from dgpp_core.bus.solo import SoloBus
from dgpp_core.checkpoint.check import check_bindings
from dgpp_core.checkpoint.config_json import read_config, read_processor
from dgpp_core.checkpoint.headers import TensorEntry, read_headers
from dgpp_core.checkpoint.image import ImageCache, ImageShape, build_with_image
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.row_files import RowFiles
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.families import require_families, step_depths
from dgpp_core.engine.geometry import Geometry, make_geometry, require_room
from dgpp_core.formats.resident import DeviceKind
from dgpp_core.host.loading import LoadedModel

Progress = Callable[[str, int, int], None]
"""Called with a stage, bytes done and bytes in all."""


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """Everything about a checkpoint that is known before a tensor is read; groups and geometry are of one rank.

    ``table``: what is taken of the model's bindings.
    """

    model: LoadedModel
    config: ModelConfig
    entries: Mapping[str, TensorEntry]
    groups: tuple[StateGroup, ...]
    geometry: Geometry
    table: BindingTable
    world: int = 1
    bf16_form: Literal["bf16", "bf12"] = "bf16"
    pool_ranks: int = 1
    vision: Vision | None = None


def prepare(
    model: LoadedModel, folder: Path, settings: EngineSettings, device_kind: DeviceKind = "cpu", *, world: int = 1
) -> Prepared:
    """Read and check config.json and every tensor header, and that ``world`` ranks can divide the model.

    Args:
        device_kind: of the device that the engine will be built on.
        world: ranks that will share the model.

    Raises:
        CheckpointError, ConfigError, PluginError: naming file, field, tensor or hook.
    """
    _require_world(world)
    config = read_config(folder, partial(model.read_config, scaling=settings.scaling), model.spec.full_config)
    entries = read_headers(folder)
    table = model.bindings(config)
    check_bindings(table, entries, world)
    vision = model.vision(config, read_processor(folder))
    prepared = prepare_config(model, config, settings, device_kind, entries=entries, world=world, table=table)
    return msgspec.structs.replace(prepared, vision=vision)


def prepare_config(
    model: LoadedModel,
    config: ModelConfig,
    settings: EngineSettings,
    device_kind: DeviceKind,
    *,
    entries: Mapping[str, TensorEntry] | None = None,
    world: int = 1,
    table: BindingTable | None = None,
) -> Prepared:
    """The same for weights that come from elsewhere, as in a benchmark; then there are no ``entries``.

    Args:
        table: the model's bindings, where they are made already.
    """
    _require_world(world)
    if wrong := [token for token in config.eos_ids if not 0 <= token < config.vocab_size]:
        limit = f"below the vocabulary size {config.vocab_size}"
        raise ConfigError("an end token is no token", where="eos_token_id", found=str(wrong[0]), expected=limit)
    groups = for_device(model.groups(config, world, msgspec.to_builtins(settings)), device_kind)
    geometry = make_geometry(config, groups, settings, model.spec.draft_depth)
    require_room(geometry, config, device_kind == "cuda")
    if device_kind == "cuda" and settings.decode_graph:
        require_families(geometry.slots, step_depths(geometry.step_width - 1, settings))
    form: Literal["bf16", "bf12"] = "bf16" if settings.bf16_weights == "checkpoint" else "bf12"
    taken = (table or model.bindings(config)).for_serving(
        drafting=geometry.step_width > 1,
        divided=settings.embed_sharding == "vocab",
        in_files=settings.ngram_table == "mmap",
        rounded=settings.dense_weights == "fp8",
    )
    return Prepared(
        model, config, entries or {}, groups, geometry, taken, world, form, settings.decode_context_parallel
    )


def _require_world(world: int) -> None:
    """Before a plugin divides by it."""
    if world < 1:
        raise ConfigError("a model needs at least one rank", where="world", found=str(world), expected=">= 1")


def pick_device(name: str) -> torch.device:
    """The torch device ``name``, a CUDA device with its index, as torch's own functions want it.

    ``auto`` is the first CUDA device, or the CPU; ``cuda`` is the first one too.

    Raises:
        ConfigError: another kind of device, or one that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError("unknown device", where="--device", found=name, expected="auto, cpu, cuda or cuda:N")
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if not count:
        raise ConfigError("no CUDA device is available", where="--device", found=name, hint="use --device cpu")
    if number and int(number) >= count:
        raise ConfigError("no such CUDA device", where="--device", found=name, expected=f"cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", int(number or 0)) if kind == "cuda" else torch.device("cpu")


class ClosableWeights(Weights, Protocol):
    """Weights that know when they are complete."""

    def finish(self) -> None:
        """Every parameter was taken."""
        ...


def build_engine(
    prepared: Prepared,
    device: torch.device,
    progress: Progress,
    bus: Bus | None = None,
    weights: ClosableWeights | None = None,
    images: ImageCache | None = None,
) -> Engine:
    """Load the weights and allocate the state of one rank.

    Args:
        bus: how the rank meets the others of ``prepared.world``; a world of one needs none. Every rank of the world
            calls this at the same time: a model may use the bus while it is built.
        weights: where the parameters come from; by default the prepared checkpoint.
        images: where resident images of the checkpoint are kept; None makes and reads none.

    Raises:
        CheckpointError, PluginError: as the loader and the plugin's hooks do.
        EngineError: the bus is of another world.
    """
    bus = bus or SoloBus()
    if bus.world != prepared.world:
        expected = f"{prepared.world}, which the checkpoint was prepared for"
        raise EngineError("the bus connects another number of ranks", found=str(bus.world), expected=expected)
    depth = prepared.geometry.step_width - 1
    with torch.inference_mode():
        _spare_reserve(device)
        files = _row_files(prepared, device, bus)
        target, drafter = _models(prepared, device, progress, bus, weights, images, files.tables)
        _spare_reserve(device)
        engine = Engine(
            target,
            drafter if depth else None,
            prepared.groups,
            prepared.geometry,
            vocab_size=prepared.config.vocab_size,
            depth=depth,
            device=device,
            check=bus.check if not files.tables else _both(bus.check, files.check),
            in_files=tuple(files.tables),
        )
        if prepared.vision is not None:
            engine.offer_sight(prepared.vision)
        return engine


def _models(
    prepared: Prepared,
    device: torch.device,
    progress: Progress,
    bus: Bus,
    weights: ClosableWeights | None,
    images: ImageCache | None,
    tables: Mapping[str, Rows],
) -> tuple[Model, Drafter | None]:
    """The model of a rank and its drafter, with their weights."""
    model, config, drafting = prepared.model, prepared.config, prepared.geometry.step_width > 1
    table = prepared.table
    part = ImageShape(rank=bus.rank, world=bus.world, device=device, dtype=_dtype(device))

    def load() -> ClosableWeights:
        return CheckpointWeights(
            table,
            prepared.entries,
            device=device,
            dtype=part.dtype,
            rank=part.rank,
            world=part.world,
            progress=lambda done, total: progress("weights", done, total),
        )

    def build(source: ClosableWeights) -> tuple[Model, Drafter | None]:
        shard = Shard(
            device=device, dtype=part.dtype, weights=source, bus=bus, bf16_form=prepared.bf16_form, drafting=drafting,
            pool_ranks=prepared.pool_ranks, tables=tables,
        )  # fmt: skip
        target = model.build(config, shard)
        # Where the table does not say which parameters are the drafter's, it has to take them all the same.
        drafts = model.spec.draft_depth and (drafting or not table.draft)
        drafter = model.drafter(config, shard, target) if drafts else None
        source.finish()
        return target, drafter

    if weights is not None or images is None:
        return build(weights or load())
    place = images.place(model.spec.name, model.plugin.identity(), table, prepared.entries, part)
    return build_with_image(place, load, build, lambda done, total: progress("resident image", done, total))


def _row_files(prepared: Prepared, device: torch.device, bus: Bus) -> RowFiles:
    """The tables that stay in the checkpoint's files, if there are any."""
    return RowFiles(
        prepared.table, prepared.entries, device=device, dtype=_dtype(device), rank=bus.rank, world=bus.world
    )


def _both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    def check() -> None:
        one()
        other()

    return check


def _dtype(device: torch.device) -> torch.dtype:
    """Of activations and dense weights."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _spare_reserve(device: torch.device) -> None:
    """Keep what torch reserves on a GPU near what tensors use, so that the memory plan holds for the card too.

    Blocks of the many sizes that loading takes on the way are given back, and from now on segments grow instead of
    being cached by size.
    """
    if device.type == "cuda":
        settle = (
            getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        )
        settle("expandable_segments:True")
        torch.cuda.empty_cache()
