"""Strict reading of JSON into msgspec structs: errors name the key, the file, what was found and what is allowed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.nearest import nearest

T = TypeVar("T")

_AT = re.compile(r"\A(?P<what>.*?)(?: - at `(?P<path>.*)`)?\Z", re.DOTALL)
_UNKNOWN = re.compile(r"\AObject contains unknown field `(?P<key>.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"\AObject missing required field `(?P<key>.*)`\Z", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+|\.\.\.)\]")


def read_text(path: Path, what: str) -> str:
    """The UTF-8 text of ``path``; ``what`` names its purpose in a `ConfigError`."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the {what}", where=str(path), found=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the {what} is not UTF-8 text", where=f"{path}, byte {error.start}", found=error.reason
        ) from None


def parse_json(text: str, where: str) -> Any:
    """JSON as Python values. A repeated key, NaN, Infinity or a number beyond a float's range is a `ConfigError`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise ConfigError(f"the key `{key}` is given twice", where=where, expected="each key once")
            found[key] = value
        return found

    def number(literal: str) -> float:
        if math.isfinite(value := float(literal)):
            return value
        raise ConfigError("a number is not finite", where=where, found=literal, expected="a finite number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=number, parse_float=number)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "not valid JSON", where=f"{where}, line {error.lineno}, column {error.colno}", found=error.msg
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deep, or an integer of thousands of digits
        raise ConfigError("not usable JSON", where=where, found=str(error)) from None


def shown(value: object, limit: int = 80) -> str:
    """A value as JSON, shortened to ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def allowed(kind: inspect.Type) -> str:
    """What a field of this type takes, in words."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            return _range(kind)
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.StrType(pattern=pattern, min_length=least):
            return f"a string matching {pattern}" if pattern else ("a non-empty string" if least else "a string")
        case inspect.StructType(fields=fields):
            return "an object with the keys " + ", ".join(field.encode_name for field in fields)
        case inspect.UnionType(types=types):
            return " or ".join(allowed(t) for t in types if not isinstance(t, inspect.NoneType))
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    signs = ((kind.ge, ">="), (kind.gt, ">"), (kind.le, "<="), (kind.lt, "<"))
    bounds = [f"{sign} {value}" for value, sign in signs if value is not None]
    return " ".join([noun, " and ".join(bounds)]).strip()


def convert(raw: object, kind: type[T], where: str) -> T:
    """``raw`` as a struct of type ``kind``.

    Args:
        where: the file (or ``command line``) that ``raw`` came from.

    Raises:
        ConfigError: naming the key as a dotted path, the file, the value found and what is allowed.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        _explain(str(error), raw, kind, where)


def _explain(message: str, raw: object, kind: type, where: str) -> NoReturn:
    parsed = _AT.match(message)
    assert parsed is not None
    what, steps = parsed["what"], _STEP.findall(parsed["path"] or "")
    value, info, names = raw, inspect.type_info(kind), []
    for key, index in steps:
        value, info = _descend(value, info, key, index)
        names.append(key or f"[{index}]")
    place = ".".join(names).replace(".[", "[")
    if unknown := _UNKNOWN.match(what):
        _refuse_unknown(unknown["key"], place, value, info, where)
    if missing := _MISSING.match(what):
        raise ConfigError(
            f"the key `{_join(place, missing['key'])}` is missing",
            where=where,
            expected=_field_allowed(info, missing["key"]),
        )
    key, colon, reason = what.partition(": ")  # a rule between fields, from a struct's __post_init__
    if colon and isinstance(value, Mapping) and key in _keys(info):
        raise ConfigError(
            f"`{_join(place, key)}` {reason}",
            where=where,
            found=shown(value.get(key)),
            expected="" if (kind_of := _field_allowed(info, key)) == "a string" else kind_of,  # the rule says more
        )
    raise ConfigError(
        f"`{place or 'the file'}` has a value that is not allowed",
        where=where,
        found=shown(value),
        expected=allowed(info),
        hint=_default(kind, [key for key, _ in steps]),
    )


def _default(kind: type, keys: Sequence[str]) -> str:
    """A hint that a key may be left out, where it has a default that is a number or a text."""
    info: inspect.Type = inspect.type_info(kind)
    default: object = None
    for key in keys:
        info = _structural(info)
        field = next((f for f in getattr(info, "fields", ()) if f.encode_name == key), None)
        if field is None:  # an entry of a list or of an object with any keys
            return ""
        info, default = field.type, field.default
    if isinstance(default, bool | int | float | str) and default != "":
        return f"choose such a value, or leave it out for the default, {shown(default)}"
    return ""


def _refuse_unknown(key: str, place: str, value: object, info: inspect.Type, where: str) -> NoReturn:
    keys = _keys(info)
    near = nearest(key, keys)
    found = value.get(key) if isinstance(value, Mapping) else None
    raise ConfigError(
        f"unknown key `{_join(place, key)}`",
        where=where,
        found=shown(found),
        expected="one of " + ", ".join(keys),
        hint=f"did you mean `{_join(place, near)}`?" if near else "",
    )


def _descend(value: object, info: inspect.Type, key: str, index: str) -> tuple[object, inspect.Type]:
    info = _structural(info)
    if key and isinstance(info, inspect.StructType):
        inner = value.get(key) if isinstance(value, Mapping) else None
        return inner, next((f.type for f in info.fields if f.encode_name == key), info)
    items: object = list(value.values()) if isinstance(value, Mapping) else value
    position = int(index) if index.isdigit() else 0
    inner = items[position] if isinstance(items, Sequence) and position < len(items) else None
    return inner, getattr(info, "item_type", getattr(info, "value_type", info))


def _structural(info: inspect.Type) -> inspect.Type:
    """Of a union, the member that has fields or items."""
    if isinstance(info, inspect.UnionType):
        return next((t for t in info.types if isinstance(t, inspect.StructType | inspect.DictType)), info.types[0])
    return info


def _keys(info: inspect.Type) -> list[str]:
    info = _structural(info)
    return [field.encode_name for field in info.fields] if isinstance(info, inspect.StructType) else []


def _field_allowed(info: inspect.Type, key: str) -> str:
    info = _structural(info)
    if not isinstance(info, inspect.StructType):
        return ""
    return next((allowed(f.type) for f in info.fields if f.encode_name == key), "")


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
