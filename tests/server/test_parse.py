"""Bodies to fields, without HTTP."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.server.messages.requests import MessagesRequest
from dgpp_core.server.parse import MAX_NESTING, parse_body, read_fields, shorten
from dgpp_core.server.requests import CHECK_ORDER, ChatRequest, CompletionRequest
from dgpp_core.server.responses.requests import ResponsesRequest
from dgpp_core.server.tokens import DetokenizeRequest, TokenizeRequest


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as raised:
        read_fields(parse_body(body), ChatRequest)
    return raised.value


def test_every_field_is_checked() -> None:
    forms = (
        ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest,
    )  # fmt: skip
    assert {name for form in forms for name in form.__struct_fields__} == set(CHECK_ORDER)
    assert len(set(CHECK_ORDER)) == len(CHECK_ORDER)


def test_a_key_repeated_among_very_many_is_named_in_time_that_grows_with_the_body_only() -> None:
    keys = ",".join(f'"k{number}":0' for number in range(40_000))
    began = time.process_time()
    parse_body(f"{{{keys}}}".encode())
    without = time.process_time() - began
    assert refused(f'{{{keys},"k39999":1}}'.encode()).param == "k39999"
    assert time.process_time() - began < 20 * without + 1


def test_the_first_failure_answers_whatever_the_order() -> None:
    for body in (
        b'{"model":"m","top_p":9,"seed":"x","messages":3}',
        b'{"messages":3,"seed":"x","top_p":9,"model":"m"}',
    ):
        assert refused(body).param == "top_p"


@pytest.mark.parametrize("levels", [MAX_NESTING, MAX_NESTING + 1])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting(levels: int, opening: str, closing: str) -> None:
    body = '{"x":' + opening * (levels - 1) + "0" + closing * (levels - 1) + "}"
    if levels <= MAX_NESTING:
        assert "x" in parse_body(body.encode())
    else:
        error = refused(body.encode())
        assert error.param == "body"
        assert str(MAX_NESTING) in error.what


def test_brackets_in_strings_are_not_nesting() -> None:
    assert parse_body(b'{"x":"' + b"[{" * 1000 + b'"}')["x"] == "[{" * 1000


@pytest.mark.parametrize("body", [b'{"a":{"b":1,"b":2}}', b'{"a":[{"b":1,"\\u0062":2}]}'])
def test_repeated_keys_at_any_level(body: bytes) -> None:
    assert (refused(body).param, refused(body).code) == ("b", "invalid_parameter")


def test_null_is_omitted_where_it_may_be() -> None:
    fields = {name: None for name in CHECK_ORDER if name not in ("model", "messages", "prompt")}
    own: dict[str, Any] = {"ignore_eos": False, "prefix_cache": True, "sse_ping_interval": 5}
    request = read_fields({"model": "m", "messages": [{}]} | fields | own, ChatRequest)
    assert request == read_fields({"model": "m", "messages": [{}]} | own, ChatRequest)


def test_surrogates() -> None:
    assert parse_body(b'{"x":"\\ud83d\\ude00"}') == {"x": "\U0001f600"}
    for half in (b"\\ud83d", b"\\uDE00", b"\\ude00\\ud83d"):
        assert refused(b'{"x":"' + half + b'"}').param == "body"


def test_long_values_are_shortened() -> None:
    assert shorten("x" * 100) == '"' + "x" * 56 + "..."
    assert shorten({"a": 1}) == '{"a": 1}'


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 400 + ".0"])
def test_a_number_that_no_double_holds_is_refused(number: str) -> None:
    """As an infinity it came to stand in the prompt as ``Infinity``, and in echoes as null."""
    schema = f'{{"type":"function","function":{{"name":"f","parameters":{{"maximum":{number}}}}}}}'
    error = refused(f'{{"model":"m","messages":[1],"tools":[{schema}]}}'.encode())
    assert error.param == "body"
    assert "larger than a double" in error.what
    assert parse_body(b'{"model":1e308,"tiny":1e-400}') == {"model": 1e308, "tiny": 0.0}
