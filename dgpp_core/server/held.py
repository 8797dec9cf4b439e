"""`response_format` and tools: what a reply is held to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.held_calls import call_source
from dgpp_core.server.parse import shorten
from dgpp_core.server.reasoning import DOES_NOT_THINK
from dgpp_core.server.requests import ChatRequest, JsonSchemaFormat
from dgpp_core.server.served import Served
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import ANY_OBJECT, GrammarError, json_value, plain_text
from dgpp_core.text.grammar.spec import Grammar, Start
from dgpp_core.text.tools.rules import CallRules

SCHEMA = "response_format.json_schema.schema"

log = logging.getLogger("dgpp.request")


def held_schema(request: ChatRequest, served: Served) -> Any:
    """The checked schema that the content is held to; None where it is free.

    Raises:
        RequestError: 400: it cannot be enforced, or replies cannot be held to anything here.
    """
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if not served.constrained:
        raise RequestError(
            f"`response_format`: {form.type} needs constrained decoding, which this model's engine does not offer",
            param="response_format",
            code="constrained_decoding_unsupported",
        )
    if form.type == "json_object":
        return ANY_OBJECT
    if form.json_schema is None:
        raise RequestError("`response_format.json_schema` is required", param="response_format.json_schema")
    return _of_schema(form.json_schema, served)


def _of_schema(form: JsonSchemaFormat, served: Served) -> Any:
    if form.schema is None:
        return ANY_OBJECT
    checked: Any = None
    try:
        checked = check_schema(form.schema)
        served.try_source(json_value(checked))
    except (SchemaError, GrammarError) as error:
        why = error.why if isinstance(error, SchemaError) else str(error)
        inside = error.path if isinstance(error, SchemaError) else served.refused_path(form.schema, checked)
        path = f"{SCHEMA}.{inside}" if inside else SCHEMA
        if form.strict:
            raise RequestError(f"`{path}`: {why}", param=path, code="unsupported_schema") from None
        log.warning("the schema %s is served as any JSON object: `%s`: %s", shorten(form.name), path, why)
        return ANY_OBJECT
    return checked


def held_to(schema: Any, calls: CallRules | None, start: Start, tools: Sequence[Any], served: Served) -> Grammar | None:
    """The grammar of a reply, or None where nothing is asked of it.

    Args:
        schema: what `held_schema` holds its content to.
        calls: which calls it may have.
        tools: as the client wrote them, for messages.

    Raises:
        RequestError: 400, a tool asks for what cannot be kept.
    """
    ends = served.text.defaults.eos_ids
    barred: tuple[int, ...] = ()
    source = json_value(schema) if schema is not None else None
    if calls is not None and served.constrained:
        source = call_source(calls, schema, tools, served)
        ends, barred = _ends_and_barred(calls, served)
    elif source is None and tools and served.text.tools is not None and served.constrained:
        source = plain_text()  # the client has tools and wants no call now
    if source is None:
        return None
    opener, closer = served.text.reasoning or ("", "")
    return Grammar(source=source, ends=ends, start=start, opener=opener, closer=closer, barred=barred)


def _ends_and_barred(calls: CallRules, served: Served) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ends a turn of calls, and what must not come inside reasoning: a call would be read as its end."""
    ends, dialect, id_of = served.text.defaults.eos_ids, served.text.tools, served.text.tokenizer.id_of
    assert dialect is not None, "rules come from a dialect"
    if calls.required and dialect.turn_end is not None:
        turn_end = id_of(dialect.turn_end)
        ends = tuple(end for end in ends if end == turn_end) or ends
    opener = id_of(dialect.markers[0])
    return ends, () if opener is None else (opener,)


def within_budget(grammar: Grammar | None, budget: int | None, start: Start, served: Served) -> Grammar | None:
    """``grammar``, and the most tokens of reasoning that a request allows; its content is as free as before.

    Raises:
        RequestError: 400, the model has no reasoning, or its engine cannot end it.
    """
    if budget is None:
        return grammar
    param = "thinking_budget"
    if served.text.reasoning is None:
        raise RequestError(
            f"`{param}`: {DOES_NOT_THINK}", param=param, code="unsupported_parameter", hint="leave it out"
        )
    if not served.constrained:
        raise RequestError(
            f"`{param}`: a budget needs constrained decoding, which this model's engine does not offer",
            param=param,
            code="constrained_decoding_unsupported",
        )
    if start == "content":
        return grammar
    opener, closer = served.text.reasoning
    free = Grammar(source="", ends=(), start=start, opener=opener, closer=closer)
    return msgspec.structs.replace(grammar or free, budget=budget)


def start_of(prompt: str, in_reasoning: bool, served: Served) -> Start:
    """Where a reply to ``prompt`` begins: its grammar is that of the content."""
    markers = served.text.reasoning
    if in_reasoning:
        return "reasoning"
    if markers is None or prompt.rstrip().endswith(markers[1]):
        return "content"
    return "either"
