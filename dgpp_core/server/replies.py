"""Response bodies, as structs that are both sent and described in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from dgpp_core.api.errors import RequestError
from dgpp_core.server.blocks import Collected
from dgpp_core.server.call_bodies import ToolCall, call_body
from dgpp_core.server.generation import TokenEntry, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.lines import line_json
from dgpp_core.text.tokenizer import Tokenizer


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: ``param`` is the request's field, ``code`` is for programs."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error, whatever its status."""

    error: ErrorDetail


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that the prefix cache had."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Reply tokens that were reasoning."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have been picked."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A picked token and the best alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of the tokens that became visible content."""

    content: tuple[TokenLogprob, ...]
    refusal: None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn. ``content`` is null where there is none but there are calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of ``n`` replies."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class WholeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply in one piece says of itself."""

    id: str
    created: int
    model: str
    system_fingerprint: None = None
    usage: UsageBody


class ChatCompletion(WholeReply, frozen=True, kw_only=True):
    """A chat reply in one piece."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: tuple[ChatChoice, ...]
    service_tier: Literal["default"] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities in the legacy form; offsets are bytes of the reply's text."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(WholeReply, frozen=True, kw_only=True):
    """A legacy completion in one piece."""

    object: Literal["text_completion"] = "text_completion"
    choices: tuple[CompletionChoice, ...]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every body and chunk of one answer begins with."""

    id: str
    created: int
    model: str


def error_message(error: RequestError) -> str:
    """What clients are told in words."""
    return f"{error.what} ({error.hint})" if error.hint else error.what


def error_body(error: RequestError) -> bytes:
    """The error object of ``error`` as JSON."""
    message = error_message(error)
    kind: Literal["invalid_request_error", "server_error"] = (
        "invalid_request_error" if error.status < 500 else "server_error"
    )
    return line_json(ErrorBody(ErrorDetail(message=message, type=kind, param=error.param, code=error.code)))


def usage_body(usage: Usage) -> UsageBody:
    """Usage as clients get it."""
    return UsageBody(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=PromptDetails(usage.cached),
        completion_tokens_details=CompletionDetails(usage.reasoning),
    )


def chat_logprobs(entries: Iterable[TokenEntry], tokenizer: Tokenizer) -> ChatLogprobs:
    """Logprobs of ``entries`` in the chat form."""
    return ChatLogprobs(content=tuple(_token_logprob(entry, tokenizer) for entry in entries))


def _token_logprob(entry: TokenEntry, tokenizer: Tokenizer) -> TokenLogprob:
    raw = tokenizer.token_bytes(entry.id)
    top = [(tokenizer.token_bytes(token), logprob) for token, logprob in entry.logprobs.top]
    return TokenLogprob(
        token=_text(raw),
        logprob=entry.logprobs.logprob,
        bytes=tuple(raw),
        top_logprobs=tuple(TopLogprob(token=_text(raw), logprob=value, bytes=tuple(raw)) for raw, value in top),
    )


def completion_logprobs(entries: Iterable[TokenEntry], tokenizer: Tokenizer, offset: int) -> CompletionLogprobs:
    """Logprobs of ``entries`` in the legacy form, the first token starting at byte ``offset``."""
    entries = tuple(entries)
    pieces = [tokenizer.token_bytes(entry.id) for entry in entries]
    offsets = [offset + sum(map(len, pieces[:count])) for count in range(len(pieces))]
    return CompletionLogprobs(
        tokens=tuple(map(_text, pieces)),
        token_logprobs=tuple(entry.logprobs.logprob for entry in entries),
        top_logprobs=tuple(
            {_text(tokenizer.token_bytes(token)): logprob for token, logprob in entry.logprobs.top} for entry in entries
        ),
        text_offset=tuple(offsets),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def chat_completion(
    head: Head, job: Job, choices: Sequence[Collected], usage: Usage, tokenizer: Tokenizer
) -> ChatCompletion:
    """A chat reply in one piece."""
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=tuple(
            ChatChoice(
                index=index,
                message=_message(choice),
                logprobs=chat_logprobs(choice.entries, tokenizer) if job.logprobs >= 0 else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ),
        usage=usage_body(usage),
        service_tier="default" if job.tier else UNSET,
        metadata=UNSET if job.metadata is None else job.metadata,
    )


def _message(choice: Collected) -> Message:
    calls = tuple(call_body(start, text) for start, text in choice.calls)
    return Message(
        content=choice.content or (None if calls else ""),
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def completion(head: Head, job: Job, choices: Sequence[Collected], usage: Usage, tokenizer: Tokenizer) -> Completion:
    """A legacy completion in one piece."""
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=tuple(
            CompletionChoice(
                index=index,
                text=choice.content,
                logprobs=completion_logprobs(choice.entries, tokenizer, 0) if job.logprobs >= 0 else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ),
        usage=usage_body(usage),
    )
