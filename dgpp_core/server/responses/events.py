"""The events of a streamed response, each with its place in the order."""

from __future__ import annotations

from typing import Any

import msgspec

from dgpp_core.server.replies import TokenLogprob
from dgpp_core.server.responses.bodies import OutputItem, ResponseBody, ResponseText
from dgpp_core.server.responses.requests import ReasoningText


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event has."""

    sequence_number: int


class Created(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """The request was taken."""

    response: ResponseBody


class InProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """It is being answered."""

    response: ResponseBody


class Completed(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The end: the response is complete."""

    response: ResponseBody


class IncompleteEnd(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end: the token limit was reached."""

    response: ResponseBody


class Failed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The end: there was an error."""

    response: ResponseBody


class Fault(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """An error; the response has failed."""

    code: str | None
    message: str
    param: str | None = None


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class OfItem(ResponseEvent, frozen=True, kw_only=True):
    """Part of an item."""

    item_id: str
    output_index: int


class OfPart(OfItem, frozen=True, kw_only=True):
    """Part of the content of an item."""

    content_index: int = 0


class PartAdded(OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item's content begins."""

    part: ResponseText | ReasoningText


class PartDone(OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part of an item's content is complete."""

    part: ResponseText | ReasoningText


class TextDelta(OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDone(OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The text is complete."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The reasoning is complete."""

    text: str


class ArgumentsDelta(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of the JSON text of a call's arguments."""

    delta: str


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The arguments are complete."""

    name: str
    arguments: str


class InputDelta(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom call's input."""

    delta: str


class InputDone(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The input is complete."""

    input: str


EVENTS: tuple[Any, ...] = (
    Created, InProgress, ItemAdded, PartAdded, TextDelta, TextDone, ReasoningDelta, ReasoningDone, ArgumentsDelta,
    ArgumentsDone, InputDelta, InputDone, PartDone, ItemDone, Completed, IncompleteEnd, Failed, Fault,
)  # fmt: skip
