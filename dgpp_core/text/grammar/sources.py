"""Grammar sources in the library's Lark dialect.

Every source turns forcing off: the library would otherwise allow one spelling of text that is certain, and a mask would
depend on how the tokenizer splits it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dgpp_core.text.grammar.endings import endless_rule
from dgpp_core.text.grammar.schema import check_schema

MAX_SPACE = 16
"""White space characters between two parts of a JSON text."""

MAX_LARK = 65_536
"""Characters of a client's own grammar."""

ANY_OBJECT = {"type": "object"}

_SPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}"
SPACE = f"SPACE: /{_SPACE}/"
"""The terminal of white space in front of a value."""

TEXT_OPTIONS = '%llguidance {"no_forcing": true}'
_JSON_OPTIONS = '%llguidance {"no_forcing": true, "skip_repetition": "once"}'
_OUTSIDE = re.compile(
    r"""(?P<literal>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[imslux]*|(?://|\#)[^\n]*)|(?P<refused>%(?!ignore\b|import\b)\w+|<|@\w+|\w\[|\b[A-Za-z_]\w*\.-?\d)"""
)


class GrammarError(ValueError):
    """A grammar that is not taken; the message says why."""


def json_object() -> str:
    """Any JSON object."""
    return json_value(ANY_OBJECT)


def plain_text() -> str:
    """Any text; no control token is text, so none can come."""
    return f"{TEXT_OPTIONS}\nstart: /(?s:.*)/\n"


def json_schema(schema: Any) -> str:
    """A JSON value that conforms to ``schema``; properties come in the schema's order.

    Raises:
        SchemaError: the schema cannot be enforced.
    """
    return json_value(check_schema(schema))


def inline_json(checked: Any) -> str:
    """A schema that `check_schema` gave, as a term of a Lark rule."""
    root = {"allOf": [checked]} if isinstance(checked, bool) else checked
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}} | root)


def regex(pattern: str) -> str:
    """A text that matches ``pattern`` (Rust's syntax) as a whole.

    Raises:
        GrammarError: the pattern ends in a lone backslash or is empty.
    """
    return f"{TEXT_OPTIONS}\nstart: BODY\nBODY: {slashed(pattern)}\n"


def slashed(pattern: str) -> str:
    """``pattern`` between slashes, as a Lark terminal has it.

    Raises:
        GrammarError: it ends in a lone backslash or is empty.
    """
    parts = re.findall(r"\\(?s:.)|[^\\]", pattern)
    if not pattern or sum(map(len, parts)) != len(pattern):
        raise GrammarError("the pattern is empty or ends in a lone backslash")
    spelled = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\r": r"\r"}
    return "/" + "".join(spelled.get(part, part) for part in parts) + "/"


def lark(definition: str) -> str:
    """A text of the client's own grammar, whose first rule is ``start``.

    Raises:
        GrammarError: it uses what is not plain Lark: control tokens, rule attributes, priorities, templates of the
            library; or a rule has no finite text.
    """
    if len(definition) > MAX_LARK:
        raise GrammarError(f"it is larger than {MAX_LARK} characters")
    for found in _OUTSIDE.finditer(definition):
        if found["refused"]:
            line = definition.count("\n", 0, found.start()) + 1
            raise GrammarError(f"line {line}: {found['refused']!r} is not supported")
    if (name := endless_rule(definition)) is not None:
        raise GrammarError(f"no finite text matches the rule {name!r}")
    return f"{TEXT_OPTIONS}\n{definition}\n"


def json_value(checked: Any) -> str:
    """A value that conforms to what `check_schema` gave.

    White space before the value is a terminal of its own; none comes after it, where the reply has to end.
    """
    return f"{_JSON_OPTIONS}\n%ignore /{_SPACE}/\n{SPACE}\nstart: value | SPACE value\nvalue: {inline_json(checked)}\n"
