"""Requests made from the OpenAPI document by schemathesis, and every answer held against it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dgpp_core.server.openapi import document

CHECKS = (
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
)  # fmt: skip
Read = Callable[[str, Any], object]

STREAM_ENDS = {
    "/v1/chat/completions": r"\ndata: \[DONE\]\n\n\Z",
    "/v1/completions": r"\ndata: \[DONE\]\n\n\Z",
    "/v1/responses": r"\n\nevent: response\.(completed|incomplete)\ndata: [^\n]+\n\n\Z",
    "/v1/messages": r"\n\nevent: message_stop\ndata: [^\n]+\n\n\Z",
}
"""How the stream of each route ends."""
BETWEEN_FIELDS = (
    "store", "tools", "tool_choice", "modalities", "response_format", "chat_template_kwargs", "reasoning_effort",
    "top_logprobs", "max_completion_tokens", "stream_options", "sse_ping_interval", "logit_bias", "text", "reasoning",
    "truncation", "background", "previous_response_id", "thinking", "output_config",
)  # fmt: skip
"""Fields that a schema can describe alone, and that are refused together with others or by this model."""


def operations() -> list[tuple[str, str]]:
    """Path and method of everything in the document."""
    paths = json.loads(document())["paths"]
    return [(path, method) for path, item in paths.items() for method in ("get", "post", "delete") if method in item]


def runs() -> list[tuple[str, str, str]]:
    """Path, method and mode; a request without a body or a parameter of its own cannot be made wrong."""
    return [
        (path, method, mode)
        for path, method in operations()
        for mode in (["acceptable", "positive", "negative"] if method == "post" else ["positive"])
    ]


def loaded(*, acceptable: bool) -> Any:
    """The document with our model's name in it, so that requests get past it; ``acceptable`` ones mostly to the end."""
    found = json.loads(document())
    for name, schema in found["components"]["schemas"].items():
        if not name.endswith("Request"):
            continue
        properties = schema["properties"]
        properties["model"] = {"enum": ["fake"]}
        for limit in ("max_tokens", "max_output_tokens"):
            if limit in properties:
                properties[limit] = {"enum": [1, 5, 40]}
        for field in BETWEEN_FIELDS if acceptable else ():
            properties.pop(field, None)
    if acceptable:
        found["components"]["schemas"]["ResponsesRequest"]["properties"]["input"] = {"type": "string"}
        message = found["components"]["schemas"]["ChatMessage"]["properties"]
        message["role"] = {"enum": ["system", "developer", "user", "assistant"]}
        message["content"] = {"type": "string"}
        message["refusal"] = {"type": "null"}
    return schemathesis.openapi.from_dict(found)


def run_cases(url: str, path: str, method: str, mode: str, count: int, seed: int, read: Read) -> Counter[int]:
    """Send ``count`` requests of ``mode`` to one operation and check what comes; answers by status.

    Args:
        mode: ``acceptable`` requests mostly get to the end, ``positive`` ones conform to the document, ``negative``
            ones do not.
        read: sends the body of a stream again and reads it as its clients do.

    Raises:
        BaseExceptionGroup: an answer is not as the document says.
        AssertionError: a stream is not.
    """
    operation = loaded(acceptable=mode == "acceptable")[path][method.upper()]
    generation = schemathesis.GenerationMode("negative" if mode == "negative" else "positive")
    statuses: Counter[int] = Counter()

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=generation))
    def run(case: Any) -> None:
        response = case.call(base_url=url, timeout=30)
        statuses[response.status_code] += 1
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            # schemathesis leaves a stream early, which is a client that leaves; ask again for the whole of it
            whole = httpx.post(url + path, json=case.body, timeout=30).text
            assert re.search(STREAM_ENDS[path], whole), whole[-500:]
            assert not re.search(r'"error":\{|event: error', whole), whole[-500:]
            read(path, case.body)
        else:
            case.validate_response(response, checks=CHECKS)

    run()
    return statuses
