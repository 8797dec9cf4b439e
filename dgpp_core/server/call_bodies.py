"""Tool calls as response bodies and chunks hold them."""

from __future__ import annotations

import msgspec

from dgpp_core.server.generation import CallArguments, CallStart
from dgpp_core.server.lines import line_json


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function and the JSON text of its arguments."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool and its input, which is any text."""

    name: str
    input: str


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call of a function that the model wants made."""

    id: str
    function: CalledFunction


class CustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool that the model wants made."""

    id: str
    custom: CalledCustom


ToolCall = FunctionCall | CustomCall


def call_body(start: CallStart, text: str) -> ToolCall:
    """A call in one piece; ``text`` is its arguments or its input."""
    if start.custom:
        return CustomCall(id=start.id, custom=CalledCustom(name=start.name, input=text))
    return FunctionCall(id=start.id, function=CalledFunction(name=start.name, arguments=text))


def call_delta(event: CallStart | CallArguments) -> bytes:
    """The ``delta`` of a chunk: the beginning of a call, or more of its arguments."""
    kind, member = (b"custom", b"input") if event.custom else (b"function", b"arguments")
    if isinstance(event, CallArguments):
        return b'{"tool_calls":[{"index":%d,"%b":{"%b":%b}}]}' % (event.call, kind, member, line_json(event.text))
    return b'{"tool_calls":[{"index":%d,"id":%b,"type":"%b","%b":{"name":%b,"%b":""}}]}' % (
        event.call, line_json(event.id), kind, kind, line_json(event.name), member,
    )  # fmt: skip
