"""The events of a streamed message."""

from __future__ import annotations

from typing import Any

import msgspec

from dgpp_core.server.messages.bodies import MessageBody, MessageFault, MessageUsage, StopReason, UsedTool
from dgpp_core.server.messages.requests import TextBlock, ThinkingBlock


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The turn begins; what the prefix cache had is not known yet."""

    message: MessageBody


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, with nothing in it."""

    index: int
    content_block: TextBlock | ThinkingBlock | UsedTool


class MoreText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class MoreThinking(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class Signature(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    """The thinking is complete."""

    signature: str


class MoreInput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: MoreText | MoreThinking | Signature | MoreInput


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Why the turn ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """The turn is complete; the usage replaces the one at its start."""

    delta: Stopped
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """The end."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """Nothing new."""


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The end, by an error."""

    error: MessageFault


EVENTS: tuple[Any, ...] = (
    MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping, ErrorEvent,
)  # fmt: skip
