"""The request bodies of the generation routes: one table for checking them and for the OpenAPI document.

`parse.read_fields` converts the fields one by one in the order of `CHECK_ORDER`, so that the first failure is the same
whatever order a client writes them in. A type that admits None treats it as an omitted field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

TOKENS_MAX = 2**31 - 1

NonEmpty = Annotated[str, Meta(min_length=1)]
TokenLimit = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stops = Annotated[list[NonEmpty], Meta(min_length=1, max_length=4)]
Interval = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="Seconds between keep-alive comments; -1 is off.")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries besides the reply."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A schema for the reply; without ``strict`` one that cannot be enforced is served as any JSON object."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all generation routes share, whatever their dialect. Unknown fields are ignored."""

    model: Annotated[str, Meta(description="The served model's id.")]
    ignore_eos: bool = False
    stream: bool | None = None
    sse_ping_interval: Interval | msgspec.UnsetType = msgspec.UNSET
    prefix_cache: bool = True
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is exact greedy.")] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=TOKENS_MAX, description="0 is off.")] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None


class GenerationRequest(SamplingRequest, frozen=True, kw_only=True):
    """Fields that chat and legacy completions share."""

    max_tokens: TokenLimit | None = None
    stream_options: StreamOptions | None = None
    stop: NonEmpty | Stops | None = None
    user: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """A chat completion."""

    messages: Annotated[list[Any], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    tools: Annotated[list[Any], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Any] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    safety_identifier: MetadataKey | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """A legacy text completion."""

    prompt: str
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


CHECK_ORDER = (
    "model", "previous_response_id", "background", "store", "user", "safety_identifier", "prompt_cache_key", "metadata",
    "modalities", "service_tier", "truncation", "max_completion_tokens", "max_tokens", "max_output_tokens",
    "ignore_eos", "stream", "stream_options", "sse_ping_interval", "prefix_cache", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logprobs", "top_logprobs",
    "include", "n", "stop", "stop_sequences", "logit_bias", "tokens", "add_special_tokens", "return_token_strs",
    "prompt", "instructions", "input", "system", "messages", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "text", "output_config", "reasoning_effort", "reasoning", "thinking", "chat_template_kwargs",
    "thinking_budget",
)  # fmt: skip
"""The order in which fields are checked: the first failure answers."""

FIELD_CODES = {
    "store": "invalid_parameter",
    "user": "invalid_parameter",
    "safety_identifier": "invalid_parameter",
    "metadata": "invalid_parameter",
}
"""The error code of a bad field, where it has one."""

REFUSED_IF_PRESENT = ("web_search_options", "functions", "function_call", "prompt_cache_options")
"""Features of the chat API that are not offered: refused whatever their value."""

REFUSED_IF_SET = ("audio", "prediction", "moderation", "prompt_cache_key", "prompt_cache_retention", "verbosity")
"""Features of the chat API that are not offered: refused unless null."""

LEGACY_REFUSED = ("echo", "suffix", "top_logprobs", "n", "best_of")
"""Features of the completions API that are not offered: refused unless null."""
