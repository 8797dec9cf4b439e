"""The grammar of a request with tools: its promises, what is refused by which path, what is let go with a word."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.scheduler.messages import VERSION, Ready
from dgpp_core.server.job import Job
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.prepare import prepare_chat
from dgpp_core.server.served import Served, served_model
from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.grammar.frames import Tokens
from dgpp_core.text.grammar.trial import Trial
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.stack import load_text

EOS = 1
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
GLM = dialect("glm")


def function(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema} | more}


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


@pytest.fixture(scope="module")
def served(write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    markers = ("<think>", "</think>", "<|observation|>", *GLM.markers)
    text = load_text(write_checkpoint(tmp_path_factory.mktemp("held"), markers, TEMPLATE), None, config_eos=(EOS,))
    ready = Ready(
        version=VERSION, pid=1, vocab_size=text.tokenizer.vocab_size, context_tokens=8192, position_ceiling=8192,
        pool_tokens=8192, row_exact=True, constrained=True, load_seconds=0, plan="",
    )  # fmt: skip
    trial = Trial(Tokens.of(text.tokenizer, ready.vocab_size, EOS), seconds=1.0)
    options = ServeOptions(model="fake", served_id="fake", checkpoint="", settings=b"{}")
    yield served_model(options, msgspec.structs.replace(text, tools=GLM), ready, 1, trial)
    trial.close()


Prepare = Callable[..., Job]


@pytest.fixture
def prepare(served: Served) -> Prepare:
    def run(*tools: Any, **fields: Any) -> Job:
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": list(tools)} | fields
        return prepare_chat(json.dumps(body).encode(), served)

    return run


@pytest.fixture
def takes(served: Served) -> Callable[[Job, str], bool]:
    """Whether a job's grammar takes a whole reply, markers written out."""
    tokenizer = served.text.tokenizer
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, EOS)

    def run(job: Job, reply: str) -> bool:
        assert job.grammar is not None
        parser = vocabulary.parser(job.grammar.source).deep_copy()
        ids = tokenizer.encode(reply)
        return bool(parser.try_consume_tokens(ids) == len(ids) and parser.is_accepting())

    return run


CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
BARE = "<tool_call>weather</tool_call>"
OTHER = "<tool_call>other</tool_call>"
TOOLS = (function("weather", WEATHER | {"additionalProperties": False}), function("clock", {"type": "object"}))

Takes = Callable[[Job, str], bool]


def test_of_its_own_accord(prepare: Prepare, takes: Takes) -> None:
    job = prepare(*TOOLS)
    assert job.grammar is not None
    for reply in ("Hello.", "", CALL, "Sure. " + CALL, CALL + CALL, BARE):
        assert takes(job, reply), reply
    for reply in (OTHER, "<tool_call>weather", CALL.replace("city", "town"), CALL + "text"):
        assert not takes(job, reply), reply
    assert job.grammar.start == "either"
    assert len(job.grammar.barred) == 1


def test_required_named_allowed_and_alone(prepare: Prepare, takes: Takes) -> None:
    clock = "<tool_call>clock</tool_call>"
    required = prepare(*TOOLS, tool_choice="required")
    assert takes(required, CALL + clock)
    assert not takes(required, "Hello.")
    named = prepare(*TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}})
    assert takes(named, clock)
    assert not takes(named, CALL)
    assert not takes(named, clock + clock)
    alone = prepare(*TOOLS, parallel_tool_calls=False)
    assert takes(alone, "Hm. " + CALL)
    assert not takes(alone, CALL + clock)
    subset = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}
    assert not takes(prepare(*TOOLS, tool_choice=subset), CALL)
    none = prepare(*TOOLS, tool_choice="none")
    assert takes(none, "Hello.")
    assert not takes(none, "Hello. " + CALL)
    assert prepare().grammar is None


def test_strict(prepare: Prepare, takes: Takes) -> None:
    job = prepare(function("weather", WEATHER | {"additionalProperties": False}, strict=True))
    assert takes(job, CALL)
    assert not takes(job, BARE), "the city is required"
    assert takes(prepare(*TOOLS), BARE), "of a tool that is strict"


def test_an_answer_in_a_form_or_a_call(prepare: Prepare, takes: Takes) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"const": 5}}}
    job = prepare(*TOOLS, response_format=schema)
    assert takes(job, "5")
    assert takes(job, CALL)
    assert not takes(job, "5" + CALL)
    assert not takes(job, "text")
    answered = prepare(*TOOLS, response_format=schema, tool_choice="none")
    assert takes(answered, "5")
    assert not takes(answered, CALL)
    called = prepare(*TOOLS, response_format=schema, tool_choice="required")
    assert takes(called, CALL)
    assert not takes(called, "5")


def test_custom_tools(prepare: Prepare, takes: Takes) -> None:
    call = "<tool_call>sql<arg_key>input</arg_key><arg_value>{}</arg_value></tool_call>"
    job = prepare(custom("sql", "regex", "SELECT [a-z]+"), *TOOLS)
    assert takes(job, call.format("SELECT x"))
    assert not takes(job, call.format("DROP x"))
    assert takes(job, CALL)
    job = prepare(custom("sql", "lark", 'start: "(" start ")" | "x"'))
    assert takes(job, call.format("((x))"))
    assert not takes(job, call.format("((x)"))


BAD = [
    (function("t", {"properties": {"a": {"not": {}}}}, strict=True), "tools[1].function.parameters.properties.a.not",
     "unsupported_schema"),
    ({"name": "t", "parameters": {"type": "objekt"}, "strict": True}, "tools[1].parameters.type", "unsupported_schema"),
    (function("t", {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, strict=True),
     "tools[1].function.parameters.properties.a.oneOf", "unsupported_schema"),
    (function("t", {"properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}}, strict=True),
     "tools[1].function.parameters", "unsupported_schema"),
    (custom("t", "regex", "a(?=b)"), "tools[1].custom.format.grammar", "invalid_grammar"),
    (custom("t", "regex", ""), "tools[1].custom.format.grammar", "invalid_grammar"),
    (custom("t", "lark", "start: ("), "tools[1].custom.format.grammar", "invalid_grammar"),
    (custom("t", "lark", "start: <|observation|>"), "tools[1].custom.format.grammar", "invalid_grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "param", "code"), BAD)
def test_promises_that_cannot_be_kept_are_refused_by_path(prepare: Prepare, tool: Any, param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(TOOLS[0], tool)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_what_is_not_promised_is_let_go_with_a_word(
    prepare: Prepare, takes: Takes, caplog: pytest.LogCaptureFixture
) -> None:
    for schema in (
        {"properties": {"city": {"type": "string"}, "a": {"type": "integer", "not": {}}}},
        {"properties": {"city": {"type": "string"}, "a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
    ):
        caplog.clear()
        job = prepare(function("weather", schema))
        assert takes(job, CALL)
        assert takes(job, CALL.replace("city", "a").replace("Köln", "5"))
        assert not takes(job, OTHER)
        assert caplog.records


def test_many_slow_tools_take_no_longer_than_one(
    prepare: Prepare, takes: Takes, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm#54003: nothing bounded what the schemas of one request may take together."""

    def slow(at: int) -> Any:
        return function(f"slow{at}", {"properties": {"n": {"type": "integer", "multipleOf": 99_999_900 + at}}})

    def seconds(*tools: Any) -> float:
        started = time.monotonic()
        job = prepare(*tools, TOOLS[0])
        assert takes(job, CALL)
        assert takes(
            job, CALL.replace("weather", tools[0]["function"]["name"]).replace("city", "n").replace("Köln", "7")
        )
        assert not takes(job, CALL.replace("city", "town"))
        return time.monotonic() - started

    assert seconds(*map(slow, (41, 59, 71, 89, 31, 37))) < 2 * seconds(slow(89))
    assert "has taken the time" in caplog.text
    with pytest.raises(RequestError) as caught:
        prepare(slow(41), function("promised", {"properties": {"a": {"not": {}}}}, strict=True))
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
