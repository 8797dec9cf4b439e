"""config.json of a checkpoint: reading it, and finding the model that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dgpp_core.api.errors import CheckpointError, ConfigError
from dgpp_core.api.spec import ModelConfig, ModelSpec
from dgpp_core.checkpoint.headers import parse_object

CONFIG = "config.json"
MAX_COUNT = 65_536


def read_model_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder.

    Raises:
        CheckpointError: not there, or not a JSON object.
        ConfigError: a ``num_*`` field that is no sensible count: tables are made from these, entry by entry.
    """
    path = folder / CONFIG
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint has no readable {CONFIG}", where=str(path), found=error.strerror or str(error)
        ) from None
    config = parse_object(raw, str(path))
    for key, value in config.items():
        if key.startswith("num_") and isinstance(value, int) and not 0 <= value <= MAX_COUNT:
            raise ConfigError(
                f"{CONFIG}: {key} is no sensible count", where=str(path), found=str(value), expected=f"0..{MAX_COUNT}"
            )
    return config


def find_spec(specs: Sequence[ModelSpec], config: Mapping[str, Any], where: str = CONFIG) -> ModelSpec:
    """The one model among ``specs`` that accepts the config's architecture.

    Raises:
        ConfigError: the config names no architecture, or none or several of ``specs`` accept it.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{CONFIG}: architectures is missing or malformed",
            where=where,
            found=repr(names),
            expected="a list with the model's class name",
        )
    found = [spec for spec in specs if any(name in spec.architectures for name in names)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"several models accept the architecture {names[0]}",
            where=where,
            found=", ".join(spec.name for spec in found),
            hint="say which one with --plugin NAME",
        )
    raise ConfigError(
        f"no installed plugin serves the architecture {names[0]}",
        where=where,
        expected="one of " + (", ".join(sorted({a for spec in specs for a in spec.architectures})) or "none"),
        hint="install the family's package, for example dgpp-llama; dgpp plugins list shows what is there",
    )


def interpret(spec: ModelSpec, config: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
    """The family's reading of a config.json.

    Raises:
        ConfigError: naming ``where``: what the family's reader refuses or stumbles over, and a key that is one
            character away from one which the model's own config.json has and this one lacks. The reader would take a
            default for it.
    """
    for key in spec.full_config:
        for near in config if key not in config else ():
            if near not in spec.full_config and _one_edit_apart(key, near):
                raise ConfigError(
                    f"{CONFIG}: the key {key!r} is misspelt", where=where, found=repr(near), hint="fetch the file again"
                )
    try:
        return spec.read_config(config)
    except ConfigError as error:
        place = where if not error.where or error.where in where else f"{where}, {error.where}"
        parts = {key: text for key, text in error.parts().items() if key not in ("what", "where")}
        raise ConfigError(error.what, where=place, **parts) from error
    except Exception as error:  # a plugin's code, on a file from elsewhere
        raise ConfigError(
            f"{CONFIG} cannot be read as a {spec.name} model", where=where, found=f"{type(error).__name__}: {error}"
        ) from error


def _one_edit_apart(a: str, b: str) -> bool:
    """Whether one character changed, added or left out makes ``a`` into ``b``."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    return max(len(a), len(b)) - head - tail <= 1
