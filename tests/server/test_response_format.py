"""`response_format` and promises about tools: what is refused, what the engine is told, and who waits for whom."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.text.grammar import sources

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}


@pytest.fixture(scope="module")
def running(serve_fake: Any) -> Iterator[Any]:
    replies = (FakeReply(match="slow", text="word " * 60), FakeReply(text='{"name": "x"}'))
    with serve_fake(FakeScript(constrained=True, replies=replies, step_ms=20.0)) as running:
        yield running


def schema_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}


REFUSED: list[tuple[Any, str, str | None]] = [
    ({"type": "xml"}, "response_format.type", None),
    ({}, "response_format", None),
    ("json_object", "response_format", None),
    ({"type": "json_schema"}, "response_format.json_schema", None),
    ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema", None),
    ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name", None),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema", None),
    ({"type": "json_schema", "json_schema": {"name": "a", "strict": 1}}, "response_format.json_schema.strict", None),
    (schema_of({"properties": {"a": {"uniqueItems": True}}}, strict=True),
     "response_format.json_schema.schema.properties.a.uniqueItems", "unsupported_schema"),
    (schema_of({"type": "objekt"}, strict=True), "response_format.json_schema.schema.type", "unsupported_schema"),
    (schema_of({"$ref": "#"}, strict=True), "response_format.json_schema.schema", "unsupported_schema"),
    (schema_of({"oneOf": [{"type": "integer"}, {"type": "number"}]}, strict=True),
     "response_format.json_schema.schema.oneOf", "unsupported_schema"),
    (schema_of({"type": "string", "pattern": "^a$", "minLength": 2}, strict=True),
     "response_format.json_schema.schema.pattern", "unsupported_schema"),
    (schema_of({"type": "string", "format": "date", "maxLength": 3}, strict=True),
     "response_format.json_schema.schema", "unsupported_schema"),
    (schema_of({"$defs": {"a.b": {"items": {"patternProperties": {"a": {}, "ab": {}}}}}, "$ref": "#/$defs/a.b"},
               strict=True),
     "response_format.json_schema.schema.$defs.a.b.items.patternProperties", "unsupported_schema"),
    (schema_of({"properties": {"x": {"anyOf": [{"type": "null"}, {"multipleOf": 1.2345678912e-9}]}}}, strict=True),
     "response_format.json_schema.schema.properties.x.anyOf.1.multipleOf", "unsupported_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "param", "code"), REFUSED)
def test_refused_by_path(running: Any, form: Any, param: str, code: str | None) -> None:
    response = running.chat(response_format=form)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]


def sent(running: Any, **fields: Any) -> dict[str, Any]:
    """What the engine is told of a request."""
    before = len(running.messages("submit"))
    response = running.chat(**fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = running.await_messages("submit", before + 1)[-1]
    return message


def test_the_engine_gets_the_grammar(running: Any) -> None:
    assert sent(running)["grammar"] is None
    assert sent(running, response_format={"type": "text"})["grammar"] is None
    found = sent(running, response_format={"type": "json_object"})["grammar"]
    assert found["source"] == sources.json_object()
    assert found["ends"] == [1]
    assert (found["start"], found["opener"], found["closer"]) == ("either", "<think>", "</think>")
    strict = sent(running, response_format=schema_of(PERSON, strict=True))["grammar"]
    assert strict["source"] == sources.json_schema(PERSON)
    assert sent(running, response_format=schema_of(PERSON))["grammar"] == strict
    assert sent(running, response_format={"type": "json_schema", "json_schema": {"name": "x"}})["grammar"] == found


def test_a_prompt_that_has_closed_reasoning_leaves_no_room_for_more(running: Any) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert sent(running, response_format={"type": "json_object"}, **off)["grammar"]["start"] == "content"


def test_a_schema_that_need_not_be_kept_becomes_any_object(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = sent(running, response_format=schema_of({"type": "object", "not": {}}))["grammar"]
    assert found["source"] == sources.json_object()
    assert "is served as any JSON object" in caplog.text
    assert "schema.not" in caplog.text


def test_the_model_says_what_it_offers(running: Any) -> None:
    (model,) = running.openai().models.list().data
    assert model.model_extra["response_format"] == {"json_object": True, "json_schema": True}


def test_an_engine_without_masks_refuses(serve_fake: Any) -> None:
    with serve_fake() as plain:
        error = plain.chat(response_format={"type": "json_object"}).json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "constrained_decoding_unsupported")


def test_a_grammar_that_takes_too_long_is_given_up_and_nobody_waits_for_it(running: Any) -> None:
    gaps: list[float] = []
    refused: list[Any] = []

    def endless() -> None:
        refused.append(running.chat(response_format=schema_of(ENDLESS, strict=True)).json()["error"])

    threads = [threading.Thread(target=endless) for _ in range(2)]
    stream = running.openai().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "slow"}], stream=True, max_tokens=60
    )
    for thread in threads:
        thread.start()
    last = time.monotonic()
    for _ in stream:
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    for thread in threads:
        thread.join(30)
    assert len(gaps) > 40
    assert sorted(gaps)[len(gaps) // 2] < 0.1
    assert max(gaps[2:]) < 1.0
    for error in refused:
        assert error["param"] == "response_format.json_schema.schema"
        assert "more than" in error["message"]
    assert json.loads(running.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]["content"])
