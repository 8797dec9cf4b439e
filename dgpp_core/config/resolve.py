"""Merging deployment, site and command line into the one configuration that a server reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.spec import ModelSpec
from dgpp_core.config.fabric import WANTED, Wanted
from dgpp_core.config.settings import SCHEDULE_KEYS, Deployment, EngineSettings, HttpSettings, Paths
from dgpp_core.config.site import HTTP_KEYS, Site
from dgpp_core.config.strict import convert

COMMAND_LINE = "command line"
LOCAL = "localhost"
OWN_FLAGS = ("model", "plugin", "checkpoint", "device", "bus")
HTTP_FLAGS = {"port": "port", "host": "bind_host", "bind_host": "bind_host", "max_body_bytes": "max_body_bytes",
              "sse_ping_interval": "sse_ping_interval", "api_key_file": "api_key_file"}  # fmt: skip

SERVICE_KEYS = frozenset(
    {"max_connections", "file_inputs", "image_inputs", "model_alias", "stats_interval_s", "admission_gather_ms"}
)  # fmt: skip
"""Engine keys that shape rank 0's service alone and are no part of the digest."""


class ResolvedPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of a deployment, ``~/`` not expanded."""

    resident_cache: str
    log_dir: str
    stage_dir: str
    release_dir: str


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Ports on rank 0."""

    http: int
    fabric: int
    journal: int


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """The only configuration a server reads.

    Attributes:
        plugin: the model's name among the plugins; empty goes by the checkpoint's architecture.
        checkpoint: a folder or repository that replaces ``model``'s; empty for none.
        device: ``cpu``, ``cuda`` or ``cuda:N``; empty for the best there is.
        bus: the transport between ranks, as of `Fabric`.
        nodes: as many as ranks.
        node_env: node-level settings, one object a node.
    """

    model: str
    plugin: str = ""
    checkpoint: str = ""
    device: str = ""
    bus: Wanted = "auto"
    release: str = ""
    engine: EngineSettings
    paths: ResolvedPaths
    http: HttpSettings
    nodes: tuple[str, ...]
    ssh_user: str
    ports: Ports
    node_env: tuple[Mapping[str, str], ...]

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.nodes)

    @property
    def served_name(self) -> str:
        """The model id that clients see."""
        return self.engine.model_alias or self.model


def default_deployment(spec: ModelSpec) -> Deployment:
    """What ``--plugin NAME`` alone serves: the model's default repository on one node."""
    return Deployment(model=spec.repository, world_size=1)


def resolve(deployment: Deployment, site: Site, flags: Mapping[str, object]) -> Resolved:
    """Engine defaults < deployment and site < ``flags``.

    Args:
        flags: command-line values under their key's name (``max_concurrency``, ``port``, ``host``, ``checkpoint``, …),
            and ``no_mtp``, ``no_prefix_cache`` and ``world``, ranks that all run on this host; None is a flag that was
            not given.

    Raises:
        ConfigError: an unknown flag, a value that is not allowed, fewer nodes than ranks, ports that collide, a setting
            that no family of this version can honour.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    own = {key: str(given.pop(key)) for key in OWN_FLAGS if key in given}
    web = {HTTP_FLAGS[key]: given.pop(key) for key in list(given) if key in HTTP_FLAGS}
    nodes = site.nodes[: deployment.world_size]
    here = given.pop("world", None)
    if here is not None:
        if int(str(here)) < 1:
            raise ConfigError("--world names no rank", where=COMMAND_LINE, found=str(here), expected=">= 1")
        nodes = (LOCAL,) * int(str(here))
    engine = _engine(deployment.engine, given)
    http = _http(deployment, site, web)
    if here is None and len(nodes) < deployment.world_size:
        raise ConfigError(
            f"the deployment needs {deployment.world_size} nodes",
            where="DGPP_NODES",
            found=f"{len(site.nodes)}: {' '.join(site.nodes)}",
            hint="name the nodes in the site file, rank 0 first",
        )
    if not re.fullmatch(r"(auto|cpu|cuda(:\d+)?)?", device := own.get("device", "")):
        expected = "auto, cpu, cuda or cuda:N"
        raise ConfigError("--device names no device", where=COMMAND_LINE, found=device, expected=expected)
    ports = Ports(http=http.port, fabric=site.fabric_port, journal=site.journal_port)
    _check_ports(ports, len(nodes))
    return Resolved(
        model=own.get("model", deployment.model),
        plugin=own.get("plugin", ""),
        checkpoint=own.get("checkpoint", ""),
        device=device,
        bus=_bus(own.get("bus", site.bus)),
        release=deployment.release,
        engine=engine,
        paths=_paths(deployment.paths, site),
        http=http,
        nodes=nodes,
        ssh_user=site.ssh_user,
        ports=ports,
        node_env=tuple({**site.node_settings, **site.node_overrides.get(node, {})} for node in nodes),
    )


def hidden_keys(resolved: Resolved, site: Site, flags: Mapping[str, object]) -> list[str]:
    """A line for each key of the site that the deployment's own ``http`` goes before, with both values.

    Args:
        flags: as of `resolve`; one that is given goes before both, and is meant.
    """
    given = {HTTP_FLAGS[key] for key, value in flags.items() if key in HTTP_FLAGS and value is not None}
    lines = []
    for key in site.http_named:
        name = HTTP_KEYS[key]
        used, there = getattr(resolved.http, name), getattr(site, key.removeprefix("DGPP_").lower())
        if name not in given and used != there:
            lines.append(f"the deployment's http.{name} {used} goes before {key} {there}")
    return lines


def _engine(base: EngineSettings, flags: dict[str, object]) -> EngineSettings:
    values: dict[str, Any] = msgspec.to_builtins(base)
    if flags.pop("no_prefix_cache", False):
        values["prefix_cache_gib"] = 0
    if flags.pop("no_mtp", False):
        values["mtp"] = False
        for key in ("mtp_depth", "mtp_schedule", *SCHEDULE_KEYS):
            del values[key]
    settings = convert(values | flags, EngineSettings, COMMAND_LINE)
    if settings.fp8_head == "mma":
        raise ConfigError("`engine.fp8_head` mma is not supported by any model family of this version")
    return settings


def _http(deployment: Deployment, site: Site, flags: Mapping[str, object]) -> HttpSettings:
    base = {"bind_host": site.http_bind, "port": site.http_port, "api_key_file": site.api_key_file}
    return convert({**base, **deployment.http, **flags}, HttpSettings, COMMAND_LINE)


def _paths(paths: Paths, site: Site) -> ResolvedPaths:
    return ResolvedPaths(
        resident_cache=site.resident_cache_dir or paths.resident_cache or "~/.cache/dgpp/resident",
        log_dir=site.log_dir,
        stage_dir=site.stage_dir,
        release_dir=site.release_dir,
    )


def _bus(name: str) -> Wanted:
    for known in WANTED:
        if name == known:
            return known
    raise ConfigError("--bus names no transport", where=COMMAND_LINE, found=name, expected=", ".join(WANTED))


def _check_ports(ports: Ports, world: int) -> None:
    if world > 1 and len({ports.http, ports.fabric, ports.journal}) < 3:
        raise ConfigError(
            "two services of rank 0 have the same port",
            where="http.port, DGPP_FABRIC_PORT, DGPP_JOURNAL_PORT",
            found=f"{ports.http}, {ports.fabric}, {ports.journal}",
            expected="three different ports",
        )


def canonical(resolved: Resolved) -> str:
    """Everything that shapes execution on every rank, as ``key=value`` pairs in one fixed order."""
    engine: dict[str, Any] = msgspec.to_builtins(resolved.engine)
    pairs: dict[str, Any] = {
        "model": resolved.checkpoint or resolved.model,
        "plugin": resolved.plugin,
        "world": resolved.world,
        "fabric_port": resolved.ports.fabric,
        "journal_port": resolved.ports.journal,
        "eos": int(not engine.pop("no_eos")),
        "rope_scaling": engine.pop("rope_scaling", "none"),
        **{key: value for key, value in engine.items() if key not in SERVICE_KEYS},
    }
    return " ".join(f"{key}={_plain(value)}" for key, value in pairs.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def digest(resolved: Resolved) -> str:
    """64-bit FNV-1a of `canonical`, 16 hex digits; ranks compare it before they serve."""
    state = 0xCBF29CE484222325
    for byte in canonical(resolved).encode():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"
