"""A request body to checked fields, each error naming the field."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.requests import CHECK_ORDER, FIELD_CODES

MAX_NESTING = 256
"""Levels of arrays and objects in a body."""

Fields = TypeVar("Fields", bound=msgspec.Struct)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; no key may be there twice, at any level.

    Raises:
        RequestError: 400 on `body`, or on the repeated key.
    """
    try:
        parsed = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
        # An escape such as \ud83d without its other half is no character and could not be written out again.
        if b"\\ud" in body or b"\\uD" in body:
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise _bad_body(f"is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise _bad_body(f"is not valid JSON: {error}") from None
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _deeper(parsed, MAX_NESTING):
        raise _bad_body(f"is nested more than {MAX_NESTING} levels deep")
    if not isinstance(parsed, dict):
        raise _bad_body(f"must be a JSON object, found {shorten(parsed)}")
    return parsed


def read_fields(raw: dict[str, Any], form: type[Fields]) -> Fields:
    """The fields of ``form`` from ``raw``, checked in `CHECK_ORDER`. Null counts as omitted where the type says so.

    Raises:
        RequestError: 400 with the path of what is wrong.
    """
    fields = _fields_of(form)
    found: dict[str, Any] = {}
    for name in filter(fields.__contains__, CHECK_ORDER):
        if name in raw:
            found[name] = convert(name, raw[name], fields[name].type)
        elif fields[name].required:
            raise RequestError(f"`{name}` is required", param=name)
    return form(**found)


@functools.cache
def _fields_of(form: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Fields by name. Finding their types takes milliseconds, and there are only as many forms as routes."""
    return {field.name: field for field in msgspec.structs.fields(form)}


def convert(name: str, value: Any, form: Any) -> Any:
    """``value`` as a ``form``; ``name`` is its path in the request.

    Raises:
        RequestError: 400 with the path of what is wrong.
    """
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        param = name + path.rstrip("`").replace("[...]", "")
        found = "" if ", got" in problem else f", found {shorten(value)}"
        what = f"`{param}`: {problem.replace('`', '')}{found}"
        raise RequestError(what, param=param, code=FIELD_CODES.get(name)) from None


def shorten(value: Any) -> str:
    """A JSON value as an error message shows it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"`{repeated}` is given more than once", param=repeated, code="invalid_parameter")
    return found


def _float(spelled: str) -> float:
    value = float(spelled)
    if math.isinf(value):  # JSON has no infinity: what is made of this body could not say it
        raise ValueError(f"{shorten(spelled)} is larger than a double can be")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _deeper(value: Any, levels: int) -> bool:
    """Whether ``value`` has more than ``levels`` levels of arrays and objects."""
    level: list[Any] = [value]
    for _ in range(levels + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _bad_body(what: str) -> RequestError:
    return RequestError(f"the request body {what}", param="body")
