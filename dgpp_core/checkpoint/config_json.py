"""config.json of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dgpp_core.api.errors import CheckpointError, ConfigError, PluginError
from dgpp_core.api.spec import ModelConfig
from dgpp_core.checkpoint.headers import parse_object

CONFIG = "config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where a checkpoint says how images are prepared; the second has it as its member `image_processor`."""
MAX_COUNT = 65_536


def read_model_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder.

    Raises:
        CheckpointError: not there, or not a JSON object.
        ConfigError: a ``num_*`` or ``n_*`` field that is no sensible count: tables are made from these, entry by entry.
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
        if key.startswith(("num_", "n_")) and isinstance(value, int) and not 0 <= value <= MAX_COUNT:
            raise ConfigError(
                f"{CONFIG}: {key} is no sensible count", where=str(path), found=str(value), expected=f"0..{MAX_COUNT}"
            )
    return config


def read_config(
    folder: Path, read: Callable[[Mapping[str, Any]], ModelConfig], known: Mapping[str, Any]
) -> ModelConfig:
    """The family's reading of a checkpoint's config.json.

    Args:
        read: the family's reader.
        known: the real model's config.json (``spec.full_config``).

    Raises:
        CheckpointError, ConfigError: as `read_model_config`; a key that is one character away from one which ``known``
            has and this config lacks, since the reader would take a default for it.
        ConfigError, PluginError: what ``read`` raises, with the file's path added.
    """
    where = str(folder / CONFIG)
    config = read_model_config(folder)
    for key in known:
        for near in config if key not in config else ():
            if near not in known and _one_edit_apart(key, near):
                raise ConfigError(
                    f"{CONFIG}: the key {key!r} is misspelt", where=where, found=repr(near), hint="fetch the file again"
                )
    try:
        return read(config)
    except (ConfigError, PluginError) as error:
        place = where if error.where in ("", CONFIG) else f"{where}, {error.where}"
        raise type(error)(
            error.what, where=place, found=error.found, expected=error.expected, hint=error.hint
        ) from error


def read_processor(folder: Path) -> Mapping[str, Any]:
    """How the checkpoint in ``folder`` wants images prepared; empty where it says nothing.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON object.
    """
    for name in PROCESSORS:
        path = folder / name
        try:
            found = parse_object(path.read_bytes(), str(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read", where=str(path), found=error.strerror or "") from None
        inner = found.get("image_processor") if name == PROCESSORS[1] else found
        if isinstance(inner, Mapping):
            return inner
    return {}


def _one_edit_apart(a: str, b: str) -> bool:
    """Whether one character changed, added or left out makes ``a`` into ``b``."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    return max(len(a), len(b)) - head - tail <= 1
