"""Schemas of strings that are written as raw text, without quotes and escapes."""

from __future__ import annotations

import re
from typing import Any

from dgpp_core.text.grammar.dialects import Term
from dgpp_core.text.grammar.formats import pattern_of
from dgpp_core.text.grammar.keywords import ANNOTATIONS
from dgpp_core.text.grammar.patterns import PatternError, translate
from dgpp_core.text.grammar.sources import slashed


class TextError(ValueError):
    """What a schema says of a string cannot be enforced of raw text."""


def text_term(schema: Any) -> Term:
    """Raw text that is a string which conforms to ``schema``.

    Raises:
        TextError: a keyword is none of ``enum``, ``const``, ``pattern``, ``format``, ``minLength`` and ``maxLength``,
            or its pattern has an anchor inside.
    """
    if not isinstance(schema, dict):
        return Term.text()
    found: list[str] = []
    listed = [schema["enum"]] if "enum" in schema else []
    for choices in [*listed, [schema["const"]]] if "const" in schema else listed:
        strings = [choice for choice in choices if isinstance(choice, str)]
        if not strings:
            raise TextError("no string conforms to it")
        found.append(slashed("|".join(f"(?:{re.escape(choice)})" for choice in strings)))
    for name, value in schema.items():
        if name == "pattern":
            found.append(slashed(_whole(value)))
        elif name == "format":
            if (pattern := pattern_of(value)) is None:
                raise TextError(f"the format {value!r} is not supported")
            found.append(slashed(pattern[1:-1]))
        elif name not in ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}:
            raise TextError(f"`{name}` is not supported of a string")
    if "minLength" in schema or "maxLength" in schema:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        found.append(f"/(?s:.{{{int(schema.get('minLength', 0))},{most}}})/")
    return Term.matching(" & ".join(found)) if found else Term.text()


def _whole(pattern: str) -> str:
    """A pattern that matches anywhere, as one of the whole text."""
    try:
        found = translate(pattern)
    except PatternError as error:
        raise TextError(str(error)) from None
    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", found)
    starts, ends = found.startswith("^"), plain.endswith("$")
    if "|" in re.sub(r"\([^()]*\)", "", plain) and (starts or ends):
        raise TextError(f"the pattern {pattern!r} has anchors beside alternatives")
    body = found[starts : len(found) - ends]
    if "^" in plain[starts:] or "$" in plain[: len(plain) - ends]:
        raise TextError(f"the pattern {pattern!r} has an anchor inside")
    return ("" if starts else "(?s:.*)") + f"(?:{body})" + ("" if ends else "(?s:.*)")
