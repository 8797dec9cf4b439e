"""The site file: the machines, ports and paths of one installation, shared by all its deployments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.envfile import Setting, parse_env
from dgpp_core.config.fabric import Wanted
from dgpp_core.config.rules import NODE_RULES, RULES
from dgpp_core.config.strict import read_text

ENV_FILE = "DGPP_ENV_FILE"
HTTP_KEYS = {"DGPP_HTTP_PORT": "port", "DGPP_HTTP_BIND": "bind_host", "DGPP_API_KEY_FILE": "api_key_file"}
"""Keys of the HTTP service, and the deployment's keys below ``http`` that go before them."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The site's settings; paths as written, ``~/`` is expanded on the node that uses them.

    Attributes:
        nodes: hosts in rank order, rank 0 first.
        ssh_user: login on peers; empty for the current user.
        ssh_config: a configuration file of the OpenSSH client to use instead of the user's; empty for none.
        python: on every node, the Python that has what dgpp depends on; empty for the one that runs the launcher.
        api_key_file: hashed API keys of the HTTP service; empty for none.
        cluster_config: the deployment file that is served when none is named; empty for none.
        bus, roce_devices, roce_gid_indices: how ranks reach each other; see `Fabric`.
        hub_cache: the Hugging Face cache; empty leaves it to `huggingface_hub`.
        resident_cache_dir: prepacked weights; empty leaves it to the deployment.
        node_overrides: by node, settings of that node alone.
        node_settings: node-level settings that were given, as text, for all nodes.
        http_named: which of `HTTP_KEYS` were given.
    """

    nodes: tuple[str, ...] = ("localhost",)
    ssh_user: str = ""
    ssh_config: str = ""
    python: str = ""
    cluster_config: str = ""
    http_port: int = 18080
    http_bind: str = "127.0.0.1"
    api_key_file: str = ""
    bus: Wanted = "auto"
    fabric_port: int = 29970
    journal_port: int = 29971
    log_dir: str = "~/dgpp/log"
    stage_dir: str = "/tmp/bus4"
    release_dir: str = "~/dgpp/releases"
    data_dir: str = "data"
    hub_cache: str = ""
    resident_cache_dir: str = ""
    roce_devices: tuple[str, ...] = ()
    roce_gid_indices: tuple[int, ...] = ()
    log_level: str = "info"
    mlock: str = "on"
    node_overrides: Mapping[str, Mapping[str, str]] = {}
    node_settings: Mapping[str, str] = {}
    http_named: tuple[str, ...] = ()


_OWN_NAMES = {"HF_HUB_CACHE": "hub_cache"}


def read_site(path: Path | None, environ: Mapping[str, str], root: Path = Path()) -> Site:
    """The site's settings: the file's, overridden by exported variables.

    Args:
        path: the site file; None is the one that ``DGPP_ENV_FILE`` names, else ``.env`` in ``root``, if it is there.
        environ: the process environment; an empty variable counts as not exported.

    Raises:
        ConfigError: a named file that is not there, a line that is no setting, a repeated key, or a value that its rule
            does not allow: naming file and line, what was found and what is allowed.
    """
    named = path or (Path(environ[ENV_FILE]) if environ.get(ENV_FILE) else None)
    file = named or root / ".env"
    found: dict[str, Setting] = {}
    if named is not None or file.is_file():
        found.update(parse_env(read_text(file, "site file"), str(file), RULES))
    for key in RULES:
        if environ.get(key):
            found[key] = Setting(environ[key], f"environment variable {key}")
    values = {key: _checked(key, setting) for key, setting in found.items()}
    fields = {_field(key): value for key, value in values.items() if key != "HF_HOME"}
    if "HF_HOME" in values:
        fields.setdefault("hub_cache", values["HF_HOME"].rstrip("/") + "/hub")
    node_settings = {key: found[key].value for key in NODE_RULES if key in found}
    if "hub_cache" in fields:
        node_settings["HF_HUB_CACHE"] = fields["hub_cache"]
    site = Site(**fields, node_settings=node_settings, http_named=tuple(key for key in HTTP_KEYS if key in found))
    _check_together(site, found)
    return site


def _field(key: str) -> str:
    return _OWN_NAMES.get(key, key.removeprefix("DGPP_").lower())


def _checked(key: str, setting: Setting) -> Any:
    try:
        return RULES[key](setting.value)
    except ValueError as error:
        raise ConfigError(
            f"{key} has a value that is not allowed", where=setting.where, found=setting.value, expected=str(error)
        ) from None


def _check_together(site: Site, found: Mapping[str, Setting]) -> None:
    def refuse(key: str, what: str, shown: str, expected: str) -> ConfigError:
        where = found[key].where if key in found else key
        return ConfigError(what, where=where, found=shown, expected=expected)

    if site.fabric_port == site.journal_port:
        key = "DGPP_JOURNAL_PORT" if "DGPP_JOURNAL_PORT" in found else "DGPP_FABRIC_PORT"
        raise refuse(
            key, "DGPP_FABRIC_PORT and DGPP_JOURNAL_PORT are the same", str(site.fabric_port), "two different ports"
        )
    if site.roce_gid_indices and len(site.roce_gid_indices) != len(site.roce_devices):
        raise refuse(
            "DGPP_ROCE_GID_INDICES",
            "DGPP_ROCE_GID_INDICES and DGPP_ROCE_DEVICES differ in number",
            f"{len(site.roce_gid_indices)} indices, {len(site.roce_devices)} devices",
            "one index a device",
        )
    for node, settings in site.node_overrides.items():
        if node not in site.nodes:
            raise refuse(
                "DGPP_NODE_OVERRIDES",
                "DGPP_NODE_OVERRIDES names an unknown node",
                node,
                "one of " + " ".join(site.nodes),
            )
        for key, value in settings.items():
            if key not in NODE_RULES:
                raise refuse(
                    "DGPP_NODE_OVERRIDES",
                    f"DGPP_NODE_OVERRIDES sets {key} of {node}, which is not a node's own",
                    key,
                    "one of " + ", ".join(NODE_RULES),
                )
            where = found["DGPP_NODE_OVERRIDES"].where if "DGPP_NODE_OVERRIDES" in found else ""
            _checked(key, Setting(value, f"{where}, DGPP_NODE_OVERRIDES of {node}"))
