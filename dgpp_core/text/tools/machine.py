"""The common part of machines that read one block of calls, however its text is cut into pieces.

Markers that are single tokens stand in a machine's text as lone surrogates: no decoded text has those, so that a marker
which a model only spells out is never taken for one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from dgpp_core.text.tools.writer import CallWriter, Malformed

SPACE = " \t\r\n"
_QUOTE = re.compile(r'\\.?|"', re.DOTALL)
LONGEST_NAME = 512
"""Characters of a name or key: more is no call, and is shown without waiting for its end."""


def sentinel(index: int) -> str:
    """The character that stands for a dialect's marker number ``index``."""
    return chr(0xD800 + index)


def is_plain(text: str) -> bool:
    """Whether ``text`` has no marker in it."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


class Machine(ABC):
    """Reads a block from after its opening marker.

    A step takes what it can from `rest` and says whether it got on. It decides on prefixes alone, so that a block fails
    at the same character whatever pieces it comes in.

    Attributes:
        rest: what is not read yet; after the end of the block, the text that follows it.
        done: the block is complete.
    """

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._step: Callable[[], bool] = self._begin
        self._strings = _Strings()
        self.rest = ""
        self.done = False

    def feed(self, text: str) -> None:
        """Read on.

        Raises:
            Malformed: this is no call.
        """
        self.rest += text
        while not self.done and self._step():
            pass

    @abstractmethod
    def _begin(self) -> bool:
        """The first step."""

    def _take(self, *tags: str, space: bool = True) -> str | None:
        """Read one of ``tags``, after white space if there may be any; None where more text must come first."""
        if space:
            self.rest = self.rest.lstrip(SPACE)
        for tag in tags:
            if self.rest.startswith(tag):
                self.rest = self.rest[len(tag) :]
                return tag
        if not any(tag.startswith(self.rest) for tag in tags):
            raise Malformed
        return None

    def _read(self, end: str) -> str | None:
        """Read a name on one line, and ``end`` behind it; None where more text must come first."""
        name, found, after = self.rest.partition(end)
        if len(name) > LONGEST_NAME or "\n" in name or not is_plain(name):
            raise Malformed
        if not found:
            return None
        self.rest = after
        return name

    def _pass_value(self, end: str, *, newline: bool) -> bool:
        """Pass on what belongs to a value, which ends before ``end``; whether that has come.

        Inside a string of what is sure to be JSON, ``end`` is text.

        Args:
            newline: one newline before ``end`` is not the value's.
        """
        text, found, after = self.rest.partition(end)
        while found and self._writer.in_json and self._strings.inside_after(text):
            self._pass(text + end)
            text, found, after = after.partition(end)
        if found:
            text = text.removesuffix("\n") if newline else text
        else:
            kept = _overlap(text, end)
            kept += newline and text[: len(text) - kept].endswith("\n")
            text, after = text[: len(text) - kept], text[len(text) - kept :]
            self._strings.take(text)
        self._pass(text)
        self.rest = after
        if found:
            self._writer.end_value()
            self._strings = _Strings()
        return bool(found)

    def _pass(self, text: str) -> None:
        if not is_plain(text):
            raise Malformed
        self._writer.value(text)


class _Strings:
    """Follows a JSON text: whether what comes next is inside a string."""

    def __init__(self) -> None:
        self._inside = self._escaped = False

    def inside_after(self, text: str) -> bool:
        """Whether the text is inside a string after ``text``."""
        self.take(text)
        return self._inside

    def take(self, text: str) -> None:
        """Go on by ``text``."""
        start = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        for found in _QUOTE.finditer(text, start):
            self._inside ^= found[0] == '"'
            self._escaped = found[0] == "\\"


def _overlap(text: str, end: str) -> int:
    """How many characters at the end of ``text`` could begin ``end``."""
    return next((size for size in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:size])), 0)
