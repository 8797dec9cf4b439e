"""The OpenAPI document, from the structs that requests are checked with and answers are made of."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from dgpp_core import __version__
from dgpp_core.server.attachments import ImageUrl
from dgpp_core.server.call_bodies import CalledCustom
from dgpp_core.server.file_routes import FILE_PATHS, FILE_TYPES
from dgpp_core.server.files import FileBody
from dgpp_core.server.messages.openapi import MESSAGES_PATHS, MESSAGES_TYPES
from dgpp_core.server.models import Health, ModelList, ModelObject
from dgpp_core.server.openapi_parts import any_of, generates, reads, ref
from dgpp_core.server.replies import (
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionLogprobs,
    ErrorBody,
    FinishReason,
    UsageBody,
)
from dgpp_core.server.requests import ChatRequest, CompletionRequest
from dgpp_core.server.responses.openapi import RESPONSES_PATHS, RESPONSES_TYPES, describe_responses
from dgpp_core.server.tokens import TOKEN_PATHS, TOKEN_TYPES


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name, or more of the JSON text of its arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CustomDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool's name, or more of its input."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    input: str


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to tool call number `index`: first its id, type and name, then arguments."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk's part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat reply; the stream ends with the event `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: Literal["default"] | msgspec.UnsetType = msgspec.UNSET
    obfuscation: str | msgspec.UnsetType = msgspec.UNSET


class TextChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk's part of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed completion; the stream ends with the event `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of a message."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image, for models that take them."""

    image_url: ImageUrl


class FilePart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A text file or a PDF, whose text goes into the prompt."""

    file: FileBody


class EarlierFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was called; its arguments are an object, or a string that holds one."""

    name: str
    arguments: str | dict[str, Any] | None = None


class EarlierCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call of an earlier turn."""

    id: str
    function: EarlierFunction


class EarlierCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool of an earlier turn."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    custom: CalledCustom


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the conversation. `tool_call_id` is required for the role `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart | FilePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[EarlierCall | EarlierCustomCall] | None = None
    tool_call_id: str | None = None


ToolName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments object."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that takes one text; `format` says which texts."""

    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function of the request."""

    function: FunctionDefinition


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A custom tool of the request."""

    custom: CustomDefinition


TYPES = (
    ChatRequest, CompletionRequest, ChatMessage, FunctionTool, CustomTool, ChatCompletion, ChatChunk, Completion,
    CompletionChunk, ErrorBody, ModelList, ModelObject, Health,
)  # fmt: skip


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    types = (*TYPES, *RESPONSES_TYPES, *MESSAGES_TYPES, *TOKEN_TYPES, *FILE_TYPES)
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    tools = {"type": "array", "maxItems": 128, "items": any_of(("FunctionTool", "CustomTool"))}
    messages = {"type": "array", "minItems": 1, "items": ref("ChatMessage")}
    components["ChatRequest"]["properties"] |= {"messages": messages, "tools": {"anyOf": [tools, {"type": "null"}]}}
    describe_responses(components)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "dgpp", "version": __version__, "description": "OpenAI-compatible model service."},
            "paths": _paths(),
            "components": {"schemas": components},
        }
    )


def _paths() -> dict[str, Any]:
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    metrics = reads("Count what happens.", {"application/json": {"type": "object"}, "text/plain": {"type": "string"}})
    model = reads("Describe the served model.", {"application/json": ref("ModelObject")}, (404,))
    return {
        "/v1/chat/completions": generates("Answer a conversation.", "ChatRequest", "ChatCompletion", ref("ChatChunk")),
        "/v1/completions": generates("Continue a text.", "CompletionRequest", "Completion", ref("CompletionChunk")),
        **RESPONSES_PATHS,
        **MESSAGES_PATHS,
        **TOKEN_PATHS,
        **FILE_PATHS,
        "/v1/models": reads("List what is served.", {"application/json": ref("ModelList")}),
        "/v1/models/{model_id}": model | {"parameters": [model_id]},
        "/health": _health(),
        "/metrics": metrics,
        "/v1/metrics": metrics,
    }


def _health() -> dict[str, Any]:
    body = {"application/json": {"schema": ref("Health")}}
    responses = {
        "200": {"description": "Requests are served.", "content": body},
        "503": {"description": "The engine has failed.", "content": body},
    }
    return {"get": {"summary": "Tell whether requests can be served.", "responses": responses}}
