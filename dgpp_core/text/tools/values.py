"""JSON text of arguments: one spacing, numbers as they were spelled."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from dgpp_core.text.tools.kinds import type_of
from dgpp_core.text.tools.rules import Key

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[,:\[\]{}]|[^\s",:\[\]{}]+', re.DOTALL)
_SPACED = {",": ", ", ":": ": "}
_SURROGATE = re.compile("[\ud800-\udfff]")


def escape(text: str) -> str:
    """``text`` as the inside of a JSON string. Escapes of pieces make the escape of the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def string(text: str) -> str:
    """``text`` as a JSON string."""
    return f'"{escape(text)}"'


def typed(text: str, key: Key) -> str:
    """The JSON text of the value that is written as ``text``, by what ``key`` declares and never by what it looks like.

    A declared string is the text itself. A union with strings is another value only where ``text`` is JSON of another
    of its types. Everything else is the JSON value that the whole text is, or else the text as a string.
    """
    if key.form == "text":
        return string(text)
    found = normalised(text)
    if found is None:
        return string(text)
    union = key.types is not None and "string" in key.types
    return string(text) if union and type_of(found) not in (key.types or frozenset()) - {"string"} else found


def flagged(text: str, key: Key) -> str:
    """The JSON text of a value that the model itself has marked as JSON."""
    found = normalised(text)
    if found is None or (key.form == "text" and not found.startswith('"')):
        return string(text)
    return found


def normalised(text: str) -> str | None:
    """``text`` with the separators ``", "`` and ``": "`` if it is one JSON value, else None.

    Escapes that need not be are written out, half a surrogate pair becomes U+FFFD, and numbers keep their spelling: a
    float would change some.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return "".join(map(_respaced, _TOKEN.findall(text)))


def _respaced(token: str) -> str:
    if token.startswith('"') and "\\" in token:
        return string(_SURROGATE.sub("\ufffd", json.loads(token)))
    return _SPACED.get(token, token)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
