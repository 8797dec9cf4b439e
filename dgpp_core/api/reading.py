"""What readers of config.json files have in common: how a value that is not supported is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from dgpp_core.api.errors import ConfigError

T = TypeVar("T")

ANOTHER = "fetch the file again, or name with --plugin the model that the checkpoint is of (`dgpp plugins list`)"
"""What to do about a config.json that is not of the model that reads it."""

MOST_SHOWN = 60
"""Characters of a value that an error shows; of a longer one it says the type."""

_SAYS = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def refuse(field: str, found: object, expected: str) -> ConfigError:
    """The error for a value that is not supported; ``field`` as it lies in config.json, with dots."""
    return ConfigError(f"config.json: {field} is not supported", where=field, found=repr(found), expected=expected)


def read_section(raw: Any, kind: type[T], what: str, where: str = "config.json") -> T:
    """``raw`` as the struct ``kind``.

    Args:
        what: it should describe, with its article.
        where: it lies.

    Raises:
        ConfigError: a member is missing or of another type.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        found, expected = _explained(str(error), raw, "" if where == "config.json" else where)
        raise ConfigError(
            f"config.json does not describe {what}", where=where, found=found, expected=expected, hint=ANOTHER
        ) from error


def _explained(message: str, raw: Any, within: str) -> tuple[str, str]:
    """What was found and what is expected, each with the key's path in config.json, of an error of msgspec."""
    what, path = _SAYS.fullmatch(message).groups(default="")  # type: ignore[union-attr]  # it takes anything
    place = f"{within}{path}".removeprefix(".")
    if missing := _MISSING.fullmatch(what):
        return "no such key", f"the key {place}{'.' if place else ''}{missing[1]}"
    wanted, _, got = what.removeprefix("Expected ").partition(", got ")
    label = f"{place}: " if place else ""
    return f"{label}{_shown(raw, path) or got.strip('`') or 'another'}", label + wanted.replace("`", "")


def _shown(raw: Any, path: str) -> str:
    """The value at a path as msgspec writes it; empty where it is long, or one of an object's that is not named."""
    for key, index in _STEP.findall(path):
        if index == "...":
            return ""
        raw = raw[key] if key else raw[int(index)]
    return text if len(text := repr(raw)) <= MOST_SHOWN else ""


def require_values(
    config: object, *, positive: Iterable[str] = (), only: Mapping[str, object] | None = None, within: str = ""
) -> None:
    """Refuse a member of ``positive`` that is not positive and finite, or one that has another value than its only one.

    Args:
        within: the object in config.json that ``config`` was read from, with a dot at the end.

    Raises:
        ConfigError: naming the first.
    """
    for name in positive:
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise refuse(f"{within}{name}", value, "a positive number")
    for name, wanted in (only or {}).items():
        if (value := getattr(config, name)) != wanted:
            raise refuse(f"{within}{name}", value, repr(wanted))


def end_tokens(found: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id`, which is one id, several or none."""
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
