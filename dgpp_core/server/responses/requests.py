"""The request body of `/v1/responses`, and the items of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dgpp_core.server.requests import (
    Effort,
    MetadataKey,
    MetadataValue,
    NonEmpty,
    SamplingRequest,
    Stops,
    TokenLimit,
)

Includable = Literal[
    "reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip
"""What `include` may name; all but the first two are parts of items that never occur here."""

REFUSED_IF_SET = (
    "conversation", "prompt", "max_tool_calls", "moderation", "prompt_cache_retention", "prompt_cache_options",
    "context_management",
)  # fmt: skip
"""Features of the API that are not offered: refused unless null."""

STREAM_MEMBERS = ("include_obfuscation",)


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text: free, any JSON object, or what a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the reply's text."""

    format: SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much to reason. Reasoning is given as it is: ``summary`` has no effect."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides the reply."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingRequest, frozen=True, kw_only=True):
    """A turn of a conversation that is given whole."""

    input: str | Annotated[list[Any], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[Any], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop: NonEmpty | Stops | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: MetadataKey | None = None
    prompt_cache_key: str | None = None


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text of the user, the system or a tool."""

    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the model."""

    text: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """What the model said instead of an answer."""

    refusal: str


class InputImage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None


class InputFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """A file."""

    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None


Part = InputText | OutputText | Refusal | InputImage | InputFile


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What somebody said. The type of this item may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class InputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier reply: its content, or what `reasoning.encrypted_content` had put beside it."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = None


class InputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of an earlier reply."""

    call_id: str
    name: str
    arguments: str


class InputResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a call gave."""

    call_id: str
    output: str | list[Part]


class InputCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool of an earlier reply."""

    call_id: NonEmpty
    name: str
    input: str


class InputCustomResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    """What a call of a custom tool gave."""

    call_id: str
    output: str | list[Part]


Item = InputMessage | InputReasoning | InputCall | InputResult | InputCustomCall | InputCustomResult
