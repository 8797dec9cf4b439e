"""A reply's text and markers to content and tool calls."""

from __future__ import annotations

from dgpp_core.text.tools.dialect import ToolDialect
from dgpp_core.text.tools.events import Event, Text
from dgpp_core.text.tools.machine import SPACE, Machine, sentinel
from dgpp_core.text.tools.rules import CallRules
from dgpp_core.text.tools.writer import CallWriter, Malformed

HELD_SPACE = 32
"""White space at the end of what is there so far, in characters, that is held back: a call that follows drops it."""


class CallParser:
    """Takes calls out of a reply.

    A block is read as calls only if all of it has their form; otherwise its text, markers included, is text of the
    reply like any other. So is a marker that stands alone, and a block that the reply's end cuts off. White space
    directly before a block, and at the end of a reply behind one, is part of the form and not of the text.

    Args:
        incremental: give a call out from its name on, instead of when its block is complete. That is right where the
            ids are constrained to well-formed blocks, because what was given out cannot be taken back: a call that the
            reply's end cuts off then keeps the arguments it has so far, as text that is no complete JSON. An argument
            that is not declared counts once, when it first comes.

    Attributes:
        dialect: how calls are written.
        calls: calls given out so far.
    """

    def __init__(self, dialect: ToolDialect, rules: CallRules, *, incremental: bool = False) -> None:
        self.dialect = dialect
        self._incremental = incremental
        self._writer = CallWriter(rules, held=incremental)
        self._machine: Machine | None = None
        self._block: list[str] = []
        self._open = False
        self._held = ""
        self._after_call = False
        self._position = 0
        self.calls = 0

    @property
    def inside(self) -> bool:
        """Whether what comes next belongs to a block, as far as is known."""
        return self._machine is not None

    def push(self, text: str) -> list[Event]:
        """Take text that has no markers in it."""
        return self._feed(text) if self._machine is not None else self._show(text)

    def mark(self, index: int) -> list[Event]:
        """Take the marker ``dialect.markers[index]``."""
        if self._machine is not None:
            return self._feed(sentinel(index))
        lead = self.dialect.lead
        if index or not self._held.endswith(lead):
            return self._show(self.dialect.markers[index])
        self._machine = self.dialect.machine(self._writer)
        self._block, self._held = [self._held, sentinel(index)], ""
        return []

    def finish(self) -> list[Event]:
        """What was held back, when no more comes."""
        events = self._fail("") if self._machine is not None else []
        held, self._held = self._held, ""
        if self._after_call and not held.strip(SPACE):
            return events
        return [*events, *self._text(held)]

    def _feed(self, text: str) -> list[Event]:
        machine = self._machine
        assert machine is not None
        self._block.append(text)
        try:
            machine.feed(text)
        except Malformed:
            return self._fail(machine.rest)
        if not machine.done:
            return self._give() if self._incremental else []
        events = self._give()
        self._drop(machine.rest)
        self._after_call = True
        return [*events, *self._show(self.dialect.literal(machine.rest))]

    def _give(self) -> list[Event]:
        events = self._writer.take()
        self.calls = self._writer.opened
        self._open = self._open or bool(events)
        return list(events)

    def _fail(self, rest: str) -> list[Event]:
        """The block is none: show it, or ``rest`` of it where its calls are out already."""
        events = self._give() if self._incremental else []
        if self._open:
            self._drop(rest)
            self._after_call = True
            return [*events, *self._show(self.dialect.literal(rest))]
        self._writer.discard()
        text = self.dialect.literal("".join(self._block))
        self._leave()
        return self._show(text)

    def _drop(self, rest: str) -> None:
        """Leave the block, whose text up to ``rest`` is not shown."""
        block, literal = "".join(self._block), self.dialect.literal
        self._position += len(literal(block)) - len(literal(rest))
        self._leave()

    def _leave(self) -> None:
        self._machine, self._block, self._open = None, [], False

    def _show(self, text: str) -> list[Event]:
        """Text outside of blocks, but for an end that a block could drop."""
        text = self._held + text
        lead = self.dialect.lead
        led = bool(lead) and text.endswith(lead)
        body = text.removesuffix(lead) if led else text
        space = min(len(body) - len(body.rstrip(SPACE)), HELD_SPACE)
        cut = len(body) - space
        self._held = text[cut:]
        return self._text(text[:cut])

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        start, self._position = self._position, self._position + len(text)
        self._after_call = False
        return [Text(text, start)]
