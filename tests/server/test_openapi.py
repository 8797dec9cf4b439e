"""The OpenAPI document holds for every answer: schemathesis against a front end over loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dgpp_core.server.openapi import document
from dgpp_core.testing.fuzz import StreamReaders
from dgpp_core.testing.openapi_cases import run_cases, runs

EXAMPLES = {"/v1/chat/completions": 100, "/v1/completions": 100}
"""Cases a mode; `benchmarks/fuzz.py` makes more of them."""
FEW = 25


@pytest.fixture(scope="module")
def readers(fake: Any) -> Iterator[StreamReaders]:
    with StreamReaders(fake.url) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), runs())
def test_answers_conform(fake: Any, readers: StreamReaders, path: str, method: str, mode: str) -> None:
    statuses = run_cases(fake.url, path, method, mode, EXAMPLES.get(path, FEW), 0, readers.read)
    if mode == "acceptable":
        assert statuses[200]
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
        assert set(responses) == {"200", "400", "401", "403", "404", "408", "413", "503"}
        for status in set(responses) - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert found["components"]["schemas"]["ErrorDetail"]["required"] == ["message", "type"]
