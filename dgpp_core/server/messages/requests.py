"""The request bodies of `/v1/messages`, and the blocks of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dgpp_core.server.requests import NonEmpty, SamplingRequest, TokenLimit

REFUSED_IF_SET = ("container", "mcp_servers", "output_format")
"""Features of the API that are not offered: refused unless null."""


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class InlineSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """The bytes of a file."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """Where a file is."""

    url: str


class FileSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A file that was uploaded."""

    file_id: str


class ImageBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """An image."""

    source: InlineSource | UrlSource | FileSource


class TextSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """The text of a document."""

    media_type: Literal["text/plain"] = "text/plain"
    data: str


class DocumentBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="document"):
    """A document: a PDF, of which the text is read, or plain text. `context` and `citations` have no effect."""

    source: InlineSource | TextSource | UrlSource | FileSource
    title: str | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the model. The signature is for clients that want one: nothing is signed."""

    thinking: str
    signature: str = ""


class HiddenThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only another service can read; it is left out of the prompt."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of an earlier reply."""

    id: NonEmpty
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


PartBlock = TextBlock | ImageBlock | DocumentBlock
InputBlock = PartBlock | ThinkingBlock | HiddenThinkingBlock | ToolUseBlock | ToolResultBlock


class InputTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody said, called or got."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `input_schema` is the JSON schema of its arguments object."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks first. The budget is kept where replies can be held; ``display`` has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A schema that the text conforms to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The effort, where the model has one, and the form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks; it has no effect."""

    user_id: str | None = None


class CountMessagesRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation whose tokens are to be counted."""

    messages: Annotated[list[InputTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountMessagesRequest, frozen=True, kw_only=True):
    """A turn of a conversation."""

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[NonEmpty], Meta(max_length=64)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
