"""`/v1/models` and `/health`: what is served and whether it can be."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.served import SamplingDefaults, Served


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine samples, and what with where a request says nothing."""

    available: bool = True
    defaults: SamplingDefaults


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tool calls are read, and whether their form can be guaranteed."""

    available: bool
    constrained: bool


class ResponseFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output."""

    json_object: bool = False
    json_schema: bool = False


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Where reasoning goes, and what each effort sets in the chat template.

    ``ignored`` are variables of reasoning that the template reads, or that its family declares, to no effect.
    """

    in_content: bool
    effort_mapping: dict[str, dict[str, Any]]
    ignored: tuple[str, ...] = ()


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a request may have, prompt and reply together."""

    request_limit_tokens: int
    position_ceiling_tokens: int
    kv_pool_tokens: int
    limited_by: Literal["position-ceiling", "kv-pool"]


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """The served model; ``row_exact``: a reply's bits were found independent of what else runs, before READY."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["dgpp"] = "dgpp"
    sampling: Sampling
    tools: Tools
    response_format: ResponseFormats = ResponseFormats()
    reasoning: Reasoning
    input_modalities: tuple[str, ...] = ("text",)
    context: Context
    row_exact: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models served here: always one."""

    object: Literal["list"] = "list"
    data: tuple[ModelObject, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether requests can be served; ``error`` says why not."""

    status: Literal["ok", "failed"]
    model: str
    error: str | None = None


def model_object(served: Served) -> ModelObject:
    """The model object of ``served``."""
    ready = served.ready
    return ModelObject(
        id=served.options.served_id,
        created=served.created,
        sampling=Sampling(defaults=served.defaults),
        tools=Tools(available=served.text.tools is not None, constrained=served.constrained),
        response_format=ResponseFormats(json_object=served.constrained, json_schema=served.constrained),
        reasoning=Reasoning(
            in_content=served.options.reasoning_in_content,
            effort_mapping=served.efforts,
            ignored=served.text.switches.ignored,
        ),
        input_modalities=("text",) if served.sight is None else ("text", "image"),
        row_exact=ready.row_exact,
        context=Context(
            request_limit_tokens=ready.context_tokens,
            position_ceiling_tokens=ready.position_ceiling,
            kv_pool_tokens=ready.pool_tokens,
            limited_by="position-ceiling" if ready.context_tokens == ready.position_ceiling else "kv-pool",
        ),
    )


def health(served: Served, client: EngineClient) -> Health:
    """The service's health now."""
    failed = client.failure is not None
    return Health(status="failed" if failed else "ok", model=served.options.served_id, error=client.failure)
