"""Changing a site file in place: lines that are not meant stay as they are, to the byte."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dgpp_core.api.errors import ConfigError
from dgpp_core.config.rules import RULES

_KEY = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=")


def edited(text: str, values: Mapping[str, str]) -> str:
    """A site file's text with ``values``: a key that is set keeps its line's place, any other is added at the end.

    Raises:
        ConfigError: a value is not allowed, or has quotes of both kinds.
    """
    for key, value in values.items():
        try:
            RULES[key](value)
        except ValueError as error:
            raise ConfigError(f"{key} has a value that is not allowed", found=value, expected=str(error)) from None
    left, lines = dict(values), text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        match = _KEY.match(line)
        if match and match[1] in left:
            end = line[len(line.rstrip("\r\n")) :]
            lines[at] = _line(match[1], left.pop(match[1])) + end
    if left and lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines, *(_line(key, value) + "\n" for key, value in left.items())])


def require_unexported(values: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Refuse to write what an exported variable would go before.

    Raises:
        ConfigError: one is exported with another value.
    """
    for key, value in values.items():
        if environ.get(key) and environ[key] != value:
            raise ConfigError(
                f"{key} is exported with another value", where="the environment", found=environ[key], expected=value,
                hint=f"unset {key}: an exported variable goes before the site file",
            )  # fmt: skip


def save(path: Path, text: str) -> None:
    """Replace the file as a whole; a new one can be read by its owner alone."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(mode)
    fresh.replace(path)


def _line(key: str, value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./+@=:~-]+", value):
        return f"{key}={value}"
    quote = "'" if '"' in value else '"'
    if quote in value:
        raise ConfigError(f"{key} has quotes of both kinds", found=value)
    return f"{key}={quote}{value}{quote}"
