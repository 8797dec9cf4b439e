"""The message object, its blocks and errors, as they are sent and described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.blocks import Block, Collected
from dgpp_core.server.generation import Finish, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.lines import line_json
from dgpp_core.server.messages.requests import TextBlock, ThinkingBlock
from dgpp_core.server.replies import Head, error_message
from dgpp_core.text.tokenizer import Tokenizer

SIGNATURE = "unsigned"
"""The signature of thinking: some clients keep only what has one."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "api_error", "overloaded_error",
]  # fmt: skip
_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: dict[int, ErrorType] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


class MessageFaultDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The same for programs."""

    error_code: str


class MessageFault(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; details are there where the error has a code."""

    type: ErrorType
    message: str
    details: MessageFaultDetails | msgspec.UnsetType = msgspec.UNSET


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """Every error of these routes, whatever its status."""

    type: Literal["error"] = "error"
    error: MessageFault


class MessageTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a prompt."""

    input_tokens: int


class UsedTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model wants made."""

    id: str
    name: str
    input: msgspec.Raw


class MessageOutputDetails(msgspec.Struct, frozen=True):
    """Reply tokens that were thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a message. What the prefix cache had is counted apart from the rest of the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The model's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[TextBlock | ThinkingBlock | UsedTool, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


def message_error(error: RequestError) -> bytes:
    """``error`` as JSON."""
    if error.code == "overloaded":
        kind: ErrorType = "overloaded_error"
    else:
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = msgspec.UNSET if error.code is None else MessageFaultDetails(error_code=error.code)
    fault = MessageFault(type=kind, message=error_message(error), details=details)
    return line_json(MessageError(error=fault))


def message(head: Head, job: Job, choices: Sequence[Collected], usage: Usage, tokenizer: Tokenizer) -> MessageBody:
    """The message in one piece."""
    (reply,) = choices
    assert reply.finish is not None
    return MessageBody(
        id=head.id,
        model=head.model,
        content=tuple(map(_content, reply.blocks)),
        stop_reason=stop_reason(reply.finish),
        stop_sequence=reply.finish.stop or None,
        usage=message_usage(usage),
    )


def stop_reason(finish: Finish) -> StopReason:
    """Why the turn ended."""
    return "stop_sequence" if finish.stop else _REASONS[finish.reason]


def message_usage(usage: Usage) -> MessageUsage:
    """Usage as clients of this dialect get it."""
    return MessageUsage(
        input_tokens=usage.prompt - usage.cached,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.completion,
        output_tokens_details=MessageOutputDetails(usage.reasoning),
    )


def _content(block: Block) -> TextBlock | ThinkingBlock | UsedTool:
    if block.call is not None:
        return UsedTool(id=block.call.id, name=block.call.name, input=msgspec.Raw(_object(block.text).encode()))
    if block.kind == "reasoning":
        return ThinkingBlock(thinking=block.text, signature=SIGNATURE)
    return TextBlock(text=block.text)


def _object(text: str) -> str:
    """``text`` if it is JSON; arguments that the token limit cut off are none, and better none than a part of them."""
    try:
        json.loads(text)
    except ValueError:
        return "{}"
    return text
