"""The OpenAPI document holds for every answer: schemathesis against a front end over loopback."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
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
EXAMPLES = {"/v1/chat/completions": 500, "/v1/completions": 1200}
"""Cases a mode; three modes make 5,100 of them."""
FEW = 25
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
    return [(path, method) for path, item in paths.items() for method in ("get", "post") if method in item]


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


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), runs())
def test_answers_conform(fake: Any, path: str, method: str, mode: str) -> None:
    operation = loaded(acceptable=mode == "acceptable")[path][method.upper()]
    generation = schemathesis.GenerationMode("negative" if mode == "negative" else "positive")
    statuses: list[int] = []

    @settings(max_examples=EXAMPLES.get(path, FEW), deadline=None, database=None, derandomize=True,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=generation))
    def run(case: Any) -> None:
        response = case.call(base_url=fake.url, timeout=30)
        statuses.append(response.status_code)
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            # schemathesis leaves a stream early, which is a client that leaves; ask again for the whole of it
            whole = httpx.post(fake.url + path, json=case.body, timeout=30).text
            assert re.search(STREAM_ENDS[path], whole), whole[-500:]
            assert not re.search(r'"error":\{|event: error', whole), whole[-500:]
        else:
            case.validate_response(response, checks=CHECKS)

    run()
    if mode == "acceptable":
        assert statuses.count(200) > len(statuses) // 10
    assert fake.chat().json()["choices"][0]["message"]["content"] == "Red, yellow and blue."


def test_the_document_is_served(fake: Any) -> None:
    response = httpx.get(fake.url + "/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.content == document()
    assert response.json()["openapi"].startswith("3.")


def test_every_generation_error_is_the_error_object() -> None:
    found = json.loads(document())
    for path in EXAMPLES:
        responses = found["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "413", "503"}
        for status in set(responses) - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert found["components"]["schemas"]["ErrorDetail"]["required"] == ["message", "type"]
