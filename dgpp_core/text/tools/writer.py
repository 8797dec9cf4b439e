"""Calls as a dialect reads them, turned into events with the JSON text of the arguments."""

from __future__ import annotations

import json
import re

from dgpp_core.text.tools.events import ArgumentsDelta, CallClosed, CallEvent, CallOpened
from dgpp_core.text.tools.rules import INPUT, CallRules, Key, Tool
from dgpp_core.text.tools.values import escape, flagged, string, typed

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Malformed(Exception):  # noqa: N818 - not a fault: the text of a reply is no call
    """A block cannot become a call any more, whatever follows."""


class CallWriter:
    """Takes the parts of calls in order and makes events of them.

    Raw text is escaped and passed on as it comes; the other values are held until they are complete, because only then
    it is known whether the text is JSON.

    Args:
        held: the reply is held to a grammar of ``rules``. That cannot count names which are free: an argument that is
            not declared and has come before is passed over then, instead of taking the block for none.
    """

    def __init__(self, rules: CallRules, *, held: bool = False) -> None:
        self._rules, self._held_to = rules, held
        self._tool = Tool(name="")
        self._key = Key(name="")
        self._raw = self._json = self._passed = False
        self._seen: set[str] = set()
        self._held: list[str] = []
        self._events: list[CallEvent] = []
        self._pieces: list[str] = []
        self._taken = self.opened = 0

    def open(self, name: str) -> None:
        """A call of ``name``.

        Raises:
            Malformed: that is no name.
        """
        if not NAME.fullmatch(name):
            raise Malformed
        self._tool = self._rules.tool(name)
        self._seen = set()
        self._add(CallOpened(self.opened, name, self._tool.custom))
        self.opened += 1

    def key(self, name: str, *, marked: bool | None = None) -> None:
        """The next argument's name. ``marked`` says that the model has marked the value as a string, or as JSON.

        Raises:
            Malformed: the call has that argument already, or it is no argument of a custom tool.
        """
        repeated = name in self._seen
        self._passed = repeated and self._held_to and all(key.name != name for key in self._tool.keys)
        self._key = self._tool.key(name)
        if self._passed:
            return
        if repeated or (self._tool.custom and name != INPUT):
            raise Malformed
        self._frame((", " if self._seen else "{") + string(name) + ": ")
        self._seen.add(name)
        self._raw = self._key.form == "text" if marked is None else marked
        self._json = marked is False
        self._held = []
        if self._raw:
            self._frame('"')

    @property
    def in_json(self) -> bool:
        """Whether the value that comes is sure to be one JSON text."""
        return self._held_to and self._key.form == "json"

    def value(self, text: str) -> None:
        """A piece of the value."""
        if self._passed:
            return
        if self._raw:
            self._pieces.append(text if self._tool.custom else escape(text))
        elif text:
            self._held.append(text)

    def end_value(self) -> None:
        """The value is complete."""
        if self._passed:
            return
        if self._raw:
            self._frame('"')
            return
        found = (flagged if self._json else typed)("".join(self._held), self._key)
        self._pieces.append(json.loads(found) if self._tool.custom else found)

    def close(self) -> None:
        """The call is complete.

        Raises:
            Malformed: a custom tool has no input.
        """
        if self._tool.custom and not self._seen:
            raise Malformed
        self._frame("}" if self._seen else "{}")
        self._add(CallClosed(self.opened - 1))

    def take(self) -> list[CallEvent]:
        """What was written since the last time; pieces of arguments that follow each other are one."""
        self._flush()
        events, self._events, self._taken = self._events, [], self.opened
        return events

    def discard(self) -> None:
        """Forget what was written since the last `take`."""
        self._events, self._pieces, self.opened = [], [], self._taken

    def _frame(self, text: str) -> None:
        """JSON around the values, which a custom call's input does without."""
        if not self._tool.custom:
            self._pieces.append(text)

    def _add(self, event: CallEvent) -> None:
        self._flush()
        self._events.append(event)

    def _flush(self) -> None:
        if text := "".join(self._pieces):
            self._events.append(ArgumentsDelta(self.opened - 1, text))
        self._pieces = []
