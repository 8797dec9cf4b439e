"""From the command line to what is served: the deployment, the model, its checkpoint, its memory plan. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dgpp_core.api.errors import CheckpointError, ConfigError
from dgpp_core.api.spec import ModelConfig
from dgpp_core.api.state import for_device
from dgpp_core.checkpoint.config_json import CONFIG, read_config, read_model_config, read_processor
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.resolve import LOCAL, Resolved, default_deployment, hidden_keys, resolve
from dgpp_core.config.settings import EngineSettings, read_deployment, without_effect
from dgpp_core.config.site import Site, read_site
from dgpp_core.host.loading import LoadedModel, PluginHost

if TYPE_CHECKING:
    from dgpp_core.engine.plan import Plan
    from dgpp_core.formats.resident import DeviceKind
    from dgpp_core.server.options import SamplingOverrides, ServeOptions, WorldOptions


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line asks for, with everything it names found.

    Attributes:
        source: the folder or repository of the weights, where they are not the model's default.
        hub: the Hugging Face cache; None is that of `huggingface_hub`.
    """

    site: Site
    resolved: Resolved
    model: LoadedModel
    source: str | None
    hub: Path | None


def choose(
    host: PluginHost, environ: Mapping[str, str], /, *, plugin: str | None, config: Path | None,
    checkpoint: str | None, anywhere: bool = False, **flags: object,
) -> Chosen:  # fmt: skip
    """Merge deployment file, site and flags, and find the model.

    Args:
        anywhere: the ranks of the deployment need not have nodes in the site.

    Raises:
        ConfigError: nothing names a model, or a file or flag is wrong.
        PluginError: no plugin serves it.
    """
    resolved, site = settle(
        host, environ, plugin=plugin, config=config, checkpoint=checkpoint, anywhere=anywhere, **flags
    )
    hub = _hub(site)
    model = host.model(resolved.plugin) if resolved.plugin else _model_of(host, resolved, hub)
    source = resolved.checkpoint or (resolved.model if resolved.model != model.spec.repository else None)
    return Chosen(site=site, resolved=resolved, model=model, source=source, hub=hub)


def settle(
    host: PluginHost, environ: Mapping[str, str], /, *, plugin: str | None, config: Path | None,
    checkpoint: str | None, anywhere: bool = False, **flags: object,
) -> tuple[Resolved, Site]:  # fmt: skip
    """The configuration alone; a deployment file is not matched with a plugin. ``anywhere``: as of `choose`."""
    site = read_site(None, environ)
    if config is None and plugin is None and checkpoint is None and site.cluster_config:
        config = Path(site.cluster_config)
    if config is not None:
        deployment = read_deployment(config)
    elif plugin is not None:
        deployment = default_deployment(host.model(plugin).spec)
    elif checkpoint is not None:
        model = _by_checkpoint(host, checkpoint, _hub(site))
        plugin, deployment = model.spec.name, default_deployment(model.spec)
    else:
        names = ", ".join(host.models())
        raise ConfigError(
            "nothing says which model",
            where="the command line",
            expected="--plugin NAME, --config FILE or --checkpoint DIR",
            hint=f"the installed models are {names}" if names else "no model is installed: see `dgpp plugins list`",
        )
    if anywhere and flags.get("world") is None:
        flags["world"] = deployment.world_size
    return resolve(deployment, site, {**flags, "plugin": plugin, "checkpoint": checkpoint}), site


def _hub(site: Site) -> Path | None:
    return Path(site.hub_cache).expanduser() if site.hub_cache else None


def _model_of(host: PluginHost, resolved: Resolved, hub: Path | None) -> LoadedModel:
    """The model of a deployment that names no plugin: by its repository, else by the checkpoint's architecture."""
    known = host.find_repository(resolved.model)
    if known is not None and not resolved.checkpoint:
        return known
    return _by_checkpoint(host, resolved.checkpoint or resolved.model, hub)


def _by_checkpoint(host: PluginHost, source: str, hub: Path | None) -> LoadedModel:
    if known := host.find_repository(source):
        return known
    raw = read_model_config(checkpoint_folder(source, hub))
    try:
        architectures = msgspec.convert(raw.get("architectures"), tuple[str, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{CONFIG}: `architectures` does not name the model",
            where=source,
            found=str(error),
            hint="name the model with --plugin",
        ) from None
    return host.find_architecture(architectures)


def checkpoint_folder(source: str, hub: Path | None) -> Path:
    """``source`` itself where it is a folder, else its snapshot in the Hugging Face cache; never the network."""
    found = _find_folder(source, hub)
    if found is None:
        raise CheckpointError(
            "the checkpoint is neither a folder nor in the Hugging Face cache",
            where=source,
            hint="fetch it first (`hf download ORG/NAME`) or name its folder; serve and plan also take --plugin",
        )
    return found


def _find_folder(source: str, hub: Path | None) -> Path | None:
    if (folder := Path(source).expanduser()).is_dir():
        return folder
    from dgpp_core.checkpoint.hub import from_cache

    return from_cache(source, hub) if source.count("/") == 1 else None


def model_config(chosen: Chosen) -> ModelConfig:
    """The config of what would be served: the checkpoint's, or what the model knows of it where it is not there."""
    model, source = chosen.model, chosen.source
    read = partial(model.read_config, scaling=chosen.resolved.engine.scaling)
    if source is None:
        return read(model.spec.full_config)
    known = model.spec.config_of(source)
    if known is not None and _find_folder(source, chosen.hub) is None:
        return read(known)
    return read_config(checkpoint_folder(source, chosen.hub), read, model.spec.full_config)


def device_kind(name: str) -> DeviceKind:
    """The kind of a device name. ``auto`` asks torch, and only where a GPU driver is loaded."""
    if name in ("", "auto"):
        if not Path("/dev/nvidiactl").exists():
            return "cpu"
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError("unknown device", where="--device", found=name, expected="auto, cpu, cuda or cuda:N")
    return "cuda" if kind == "cuda" else "cpu"


def plan_of(chosen: Chosen, available: int | None) -> Plan:
    """The memory plan of one rank, from config.json and the tables alone.

    Args:
        available: bytes there are; None asks the machine.

    Raises:
        ConfigError: no request would fit, whatever the memory; a GPU is asked that is not there.
    """
    from dgpp_core.engine.families import require_families, step_depths
    from dgpp_core.engine.geometry import make_geometry, require_room
    from dgpp_core.engine.plan import make_plan

    model, world, config = chosen.model, chosen.resolved.world, model_config(chosen)
    kind = device_kind(chosen.resolved.device)
    settings = chosen.resolved.engine.on_device(gpu=kind == "cuda")
    groups = for_device(model.groups(config, world, msgspec.to_builtins(settings)), kind)
    geometry = make_geometry(config, groups, settings, model.spec.draft_depth)
    require_room(geometry, config, kind == "cuda")
    if kind == "cuda" and settings.decode_graph:
        require_families(geometry.slots, step_depths(geometry.step_width - 1, settings))
    return make_plan(
        table=model.bindings(config),
        groups=groups,
        config=config,
        settings=settings,
        world=world,
        device_kind=kind,
        step_width=geometry.step_width,
        extra=model.plan_terms(config, world, msgspec.to_builtins(settings)),
        available=_available(kind) if available is None else available,
    )


def _available(kind: DeviceKind) -> int:
    if kind == "cpu":
        from dgpp_core.engine.memory import LinuxMemory

        return LinuxMemory().available()
    import torch

    if not torch.cuda.is_available():
        hint = "say with --available how much memory the planned one has"
        raise ConfigError("no CUDA device is available", where="--device", found=kind, hint=hint)
    return int(torch.cuda.mem_get_info()[0])


def converted_cache(environ: Mapping[str, str]) -> Path:
    """Where converted checkpoints are kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgpp" / "checkpoints"


def find_checkpoint(chosen: Chosen, environ: Mapping[str, str], offline: bool) -> Path:
    """The folder of a complete checkpoint, fetched or converted if need be, with progress on stderr."""
    from rich.console import Console

    from dgpp_core.checkpoint.locate import locate
    from dgpp_core.scheduler.messages import Loading
    from dgpp_core.server.progress import LoadingDisplay

    with LoadingDisplay(Console(stderr=True)) as display:
        return locate(
            chosen.model.spec,
            chosen.source,
            cache=converted_cache(environ),
            offline=offline,
            report=lambda stage, done, total: display.show(Loading(stage, done, total)),
            hub=chosen.hub,
        )


def serve_options(
    chosen: Chosen,
    folder: Path,
    sampling: SamplingOverrides,
    seed: int | None,
    *,
    image: bool = True,
    world: WorldOptions | None = None,
) -> ServeOptions:
    """What the service is started with.

    Args:
        image: keep and use a resident image of the weights.
        world: as `world_options` says.

    Raises:
        ConfigError: config.json is wrong.
        PlanError, CheckpointError: the ranks cannot divide the model.
    """
    from dgpp_core.server.options import ServeOptions

    resolved, model = chosen.resolved, chosen.model
    settings = resolved.engine
    read = partial(model.read_config, scaling=settings.scaling)
    config = read_config(folder, read, model.spec.full_config)
    if world is not None:
        require_divisible(model, config, world.size, settings)
    return ServeOptions(
        model=model.spec.name,
        served_id=resolved.served_name,
        checkpoint=str(folder),
        settings=msgspec.json.encode(settings),
        dialect=model.dialect(),
        vision=model.vision(config, read_processor(folder)),
        config_eos=config.eos_ids,
        slots=settings.max_concurrency,
        queue_limit=settings.queue_limit,
        max_connections=settings.max_connections,
        default_max_tokens=settings.default_max_tokens,
        reasoning_in_content=settings.reasoning_in_content,
        no_eos=settings.no_eos,
        http=resolved.http,
        files=settings.file_inputs,
        images=settings.image_inputs,
        device=resolved.device or "auto",
        image_cache=str(Path(resolved.paths.resident_cache).expanduser()) if image else "",
        sampling=sampling,
        seed=seed,
        world=world,
    )


def require_divisible(model: LoadedModel, config: ModelConfig, world: int, settings: EngineSettings) -> None:
    """Refuse a world that the model's state or tensors cannot be divided among, before any rank is started.

    Raises:
        PlanError, CheckpointError: as each rank would.
    """
    from dgpp_core.checkpoint.cuts import cut_shape

    model.groups(config, world, msgspec.to_builtins(settings))
    for binding in model.bindings(config).tensors:
        cut_shape(binding, world)


def log_folder(resolved: Resolved) -> str:
    """Where the ranks of a service leave their fault files: services of one host have ports of their own."""
    return f"{resolved.paths.log_dir}/port-{resolved.http.port}"


def fabric_of(chosen: Chosen) -> Fabric:
    """How this host reaches other ranks."""
    site = chosen.site
    return Fabric(bus=chosen.resolved.bus, devices=site.roce_devices, gid_indices=site.roce_gid_indices)


def world_options(chosen: Chosen, rendezvous: str | None, epoch: int, log_dir: str | None) -> WorldOptions | None:
    """The ranks of a deployment; None where there is one.

    Args:
        rendezvous: where to listen for ranks that are started elsewhere; None starts them all here.

    Raises:
        ConfigError: some have to be started elsewhere, or there are none.
    """
    from dgpp_core.server.options import WorldOptions

    resolved = chosen.resolved
    if resolved.world == 1:
        if rendezvous is not None:
            expected = "a world of several, by --world or the deployment's world_size"
            raise ConfigError("a world of one waits for no other ranks", where="--rendezvous", expected=expected)
        return None
    if rendezvous is None and (elsewhere := [node for node in resolved.nodes if node != LOCAL]):
        raise ConfigError(
            "ranks of this deployment run on other hosts",
            where="DGPP_NODES",
            found=", ".join(elsewhere),
            hint=f"run all here with --world {resolved.world}, or start each with `dgpp rank` and give --rendezvous",
        )
    return WorldOptions(
        size=resolved.world,
        log_dir=log_dir or log_folder(resolved),
        rendezvous=rendezvous or "",
        epoch=epoch,
        fabric_port=resolved.ports.fabric if rendezvous else 0,
        timeout=resolved.engine.rendezvous_timeout_ms / 1e3,
        fabric=fabric_of(chosen),
    )


def warn_of_hidden_keys(resolved: Resolved, site: Site, flags: Mapping[str, object]) -> None:
    """Say on stderr which keys of the site the deployment goes before."""
    for line in hidden_keys(resolved, site, flags):
        click.echo(f"warning: {line}", err=True)


def warn_of_idle_keys(resolved: Resolved) -> None:
    """Say on stderr which settings nothing acts on."""
    for key, where in without_effect(resolved.engine).items():
        click.echo(f"warning: engine.{key} has no effect {where}", err=True)
