"""The site file's syntax: ``KEY=value`` lines read as data. No interpolation, no shell."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

import msgspec

from dgpp_core.api.errors import ConfigError

_LINE = re.compile(r"\s*(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")
_QUOTED = re.compile(r"(?P<quote>['\"])(?P<text>.*?)(?P=quote)\s*(?:#.*)?")
_COMMENT = re.compile(r"(?:^|\s+)#.*")


class Setting(msgspec.Struct, frozen=True):
    """A value and where it was found, for errors."""

    value: str
    where: str


def parse_env(text: str, file: str, keys: Container[str]) -> Mapping[str, Setting]:
    """The settings of a site file.

    A value may stand in single or double quotes, after which only a comment may follow; without quotes it ends at white
    space and ``#``. Lines with a key that is not in ``keys`` are skipped unread, and no error shows their text: they
    may hold credentials.

    Raises:
        ConfigError: naming file and line: not ``KEY=value``, an unclosed quote, text after a quote, a repeated key.
    """
    found: dict[str, Setting] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}, line {number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError("the line is not a setting", where=where, expected="KEY=value, or # and a comment")
        key = match["key"]
        if key not in keys:
            continue
        if key in found:
            raise ConfigError(
                f"{key} is set twice", where=where, found=f"the first one is at {found[key].where}", expected="once"
            )
        found[key] = Setting(_value(match["value"].strip(), key, where), where)
    return found


def _value(text: str, key: str, where: str) -> str:
    if text[:1] not in ("'", '"'):
        return _COMMENT.sub("", text).rstrip()
    match = _QUOTED.fullmatch(text)
    if match is None:
        fault = "has no closing quote" if text.count(text[0]) == 1 else "has text after the closing quote"
        raise ConfigError(
            f"the value of {key} {fault}", where=where, found=text, expected="after the quote at most a comment"
        )
    return match["text"]
