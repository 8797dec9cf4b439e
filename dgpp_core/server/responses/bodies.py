"""The response object and its items, as they are sent and described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dgpp_core.server.blocks import Block, Collected
from dgpp_core.server.generation import Usage
from dgpp_core.server.job import Job
from dgpp_core.server.replies import Head, TokenLogprob, chat_logprobs
from dgpp_core.server.responses.history import sealed
from dgpp_core.server.responses.requests import ReasoningText
from dgpp_core.text.tokenizer import Tokenizer

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The form that the text was asked to have."""

    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})


class ReasoningEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning that was asked for."""

    effort: str | None = None
    summary: str | None = None


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request; ``seals_reasoning`` asks for `encrypted_content`."""

    instructions: str | None
    max_output_tokens: int | None
    tools: tuple[Any, ...]
    tool_choice: Any
    parallel_tool_calls: bool
    text: TextEcho
    reasoning: ReasoningEcho
    top_logprobs: int
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    seals_reasoning: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the reply."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[ResponseText, ...]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]
    encrypted_content: str | UnsetType | None = UNSET


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function that the model wants made; ``arguments`` is JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool that the model wants made."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that the prefix cache had. Writing to it is never counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Reply tokens that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response, at any time of its life."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None = None
    incomplete_details: Incomplete | None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    tools: tuple[Any, ...]
    tool_choice: Any
    parallel_tool_calls: bool
    text: TextEcho
    reasoning: ReasoningEcho
    top_logprobs: int
    temperature: float
    top_p: float
    metadata: dict[str, str]
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


def echo_of(job: Job) -> Echo:
    """What the answer to ``job`` repeats."""
    assert isinstance(job.echo, Echo)
    return job.echo


def blank(head: Head, job: Job) -> ResponseBody:
    """The response as it begins."""
    echo = echo_of(job)
    repeated = {name: getattr(echo, name) for name in Echo.__struct_fields__ if name != "seals_reasoning"}
    return ResponseBody(
        id=head.id,
        created_at=head.created,
        status="in_progress",
        model=head.model,
        temperature=job.params.temperature,
        top_p=job.params.top_p,
        metadata=job.metadata or {},
        **repeated,
    )


def response(head: Head, job: Job, choices: Sequence[Collected], usage: Usage, tokenizer: Tokenizer) -> ResponseBody:
    """The response in one piece."""
    (reply,) = choices
    cut = reply.finish_reason == "length"
    return msgspec.structs.replace(
        blank(head, job),
        status="incomplete" if cut else "completed",
        incomplete_details=Incomplete() if cut else None,
        output=tuple(
            item_of(head, job, index, block, tokenizer, "completed" if reply.is_whole(block) else "incomplete")
            for index, block in enumerate(reply.blocks)
        ),
        usage=_usage(usage),
    )


def item_of(head: Head, job: Job, index: int, block: Block, tokenizer: Tokenizer, status: ItemStatus) -> OutputItem:
    """Output item number ``index``; one in progress has nothing in it yet."""
    begun = status == "in_progress"
    own = f"{head.id.partition('_')[2]}{index:02x}"
    if block.call is not None:
        call, text = block.call, "" if begun else block.text
        if call.custom:
            return CustomCallItem(id=f"ctc_{own}", status=status, call_id=call.id, name=call.name, input=text)
        return CallItem(id=f"fc_{own}", status=status, call_id=call.id, name=call.name, arguments=text)
    if block.kind == "reasoning":
        return ReasoningItem(
            id=f"rs_{own}",
            status=status,
            content=() if begun else (ReasoningText(text=block.text),),
            encrypted_content=(None if begun else sealed(block.text)) if echo_of(job).seals_reasoning else UNSET,
        )
    return MessageItem(id=f"msg_{own}", status=status, content=() if begun else (text_part(job, block, tokenizer),))


def text_part(job: Job, block: Block, tokenizer: Tokenizer) -> ResponseText:
    """The text of a message, with its log probabilities where they were asked for."""
    entries = block.entries if job.logprobs >= 0 else ()
    return ResponseText(text=block.text, logprobs=chat_logprobs(entries, tokenizer).content)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt,
        input_tokens_details=InputDetails(usage.cached),
        output_tokens=usage.completion,
        output_tokens_details=OutputDetails(usage.reasoning),
        total_tokens=usage.prompt + usage.completion,
    )
