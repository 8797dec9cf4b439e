"""The dialect's part of the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dgpp_core.server.openapi_parts import answers, any_of, generates
from dgpp_core.server.responses.bodies import InputTokens, ResponseBody
from dgpp_core.server.responses.events import EVENTS
from dgpp_core.server.responses.history import KINDS
from dgpp_core.server.responses.requests import ResponsesRequest

ToolName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class ResponsesFunction(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call; `parameters` is the JSON schema of its arguments object."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesCustom(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool that takes one text; `format` says which texts."""

    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = None


RESPONSES_TYPES = (
    ResponsesRequest, ResponseBody, InputTokens, ResponsesFunction, ResponsesCustom, *KINDS.values(), *EVENTS,
)  # fmt: skip

_EVENT = any_of(kind.__name__ for kind in EVENTS)
RESPONSES_PATHS = {
    "/v1/responses": generates("Answer a conversation.", "ResponsesRequest", "ResponseBody", _EVENT),
    "/v1/responses/input_tokens": answers("Count the tokens of a conversation.", "ResponsesRequest", "InputTokens"),
}


def describe_responses(components: dict[str, Any]) -> None:
    """Write out what the structs leave open: the items of the input, and the tools."""
    items = {"type": "array", "minItems": 1, "items": any_of(kind.__name__ for kind in KINDS.values())}
    tools = {"type": "array", "maxItems": 128, "items": any_of(("ResponsesFunction", "ResponsesCustom"))}
    components["ResponsesRequest"]["properties"] |= {
        "input": {"anyOf": [{"type": "string"}, items]},
        "tools": {"anyOf": [tools, {"type": "null"}]},
    }
