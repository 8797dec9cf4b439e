"""Which keyword of a schema it is that the library refuses. Its messages say why and not where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dgpp_core.text.grammar.keywords import NAMED, ONE, SEVERAL

Steps = tuple[str | int, ...]
Verdict = Callable[[Any], str]
"""What is wrong with a checked schema, empty where nothing is."""

MAX_TRIES = 100
"""Schemas that are tried at most: a message about the whole schema is better than a wait."""


def refused_path(written: Any, checked: Any, why: str, verdict: Verdict) -> str:
    """The path of the keyword for which a schema is refused; empty where no single one is to blame.

    It is the keyword without which the deepest part that is refused by itself, for the same reason, is not.

    Args:
        written: the schema as the client wrote it; the path leads into it.
        checked: what `check_schema` made of it.
        why: the verdict on the whole.
        verdict: tries a part, together with the definitions of the whole.
    """
    if not isinstance(checked, Mapping):
        return ""
    return ".".join(map(str, _within(written, _Search(checked, why, verdict).steps())))


class _Search:
    """Tries parts of a schema until `MAX_TRIES` are used up."""

    def __init__(self, schema: Mapping[str, Any], why: str, verdict: Verdict) -> None:
        self._schema, self._why, self._verdict = schema, why, verdict
        self._definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        self._left = MAX_TRIES

    def steps(self) -> Steps:
        """The way to the keyword."""
        path, part = self._deepest()
        # Without a type most else would mean nothing, so a type is blamed last.
        names = sorted(part, key=lambda name: name == "type") if isinstance(part, Mapping) else []
        for name in names:
            rest = {other: value for other, value in part.items() if other != name}
            if name not in self._definitions and self._refused(rest) is False:
                return (*path, name)
        return path

    def _deepest(self) -> tuple[Steps, Any]:
        path: Steps = ()
        part: Any = self._schema
        while found := next((child for child in _children(part) if self._refused(child[1])), None):
            path, part = (*path, *found[0]), found[1]
        return path, part

    def _refused(self, part: Any) -> bool | None:
        """Whether it is refused for the same reason; None where it may not be tried any more."""
        self._left -= 1
        if self._left < 0:
            return None
        return self._verdict({**self._definitions, **part} if isinstance(part, Mapping) else part) == self._why


def _children(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """The schemas directly inside one, by their paths in it."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in ONE:
            yield (keyword,), value
        elif keyword in SEVERAL:
            yield from (((keyword, at), child) for at, child in enumerate(value))
        elif keyword in NAMED:
            yield from (((keyword, name), child) for name, child in value.items())


def _within(written: Any, steps: Steps) -> Steps:
    """As much of a path as there is in what the client wrote: checking puts some keywords in other words."""
    for count, step in enumerate(steps):
        try:
            written = written[step]
        except (LookupError, TypeError):
            return steps[:count]
    return steps
