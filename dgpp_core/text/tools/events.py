"""What the parser of tool calls makes of a reply."""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Text that is no part of a call; ``start`` is its offset in the reply, in characters, markers counted as text."""

    text: str
    start: int


class CallOpened(msgspec.Struct, frozen=True):
    """A call of the tool ``name`` begins; ``call`` numbers the calls of a reply from 0.

    ``custom`` is one of a custom tool: what continues it is its input, any text, and no JSON.
    """

    call: int
    name: str
    custom: bool = False


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """``text`` continues the JSON text of a call's arguments object, or the input of a custom call."""

    call: int
    text: str


class CallClosed(msgspec.Struct, frozen=True):
    """A call is complete: its arguments are one JSON object, unless it is a custom call."""

    call: int


CallEvent = CallOpened | ArgumentsDelta | CallClosed
Event = Text | CallEvent
