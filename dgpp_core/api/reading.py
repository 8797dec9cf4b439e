"""What readers of config.json files have in common: how a value that is not supported is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from dgpp_core.api.errors import ConfigError

T = TypeVar("T")


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
        raise ConfigError(f"config.json does not describe {what}", where=where, found=str(error)) from error


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
