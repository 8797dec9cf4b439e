"""`response_format`: what the content of a reply is held to."""

from __future__ import annotations

import logging
from typing import Any

from dgpp_core.api.errors import RequestError
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import ChatRequest, JsonSchemaFormat
from dgpp_core.server.served import Served
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import ANY_OBJECT, GrammarError, json_value
from dgpp_core.text.grammar.spec import Grammar, Start

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
    try:
        checked = check_schema(form.schema)
        try_source(json_value(checked), served)
    except (SchemaError, GrammarError) as error:
        path = f"{SCHEMA}.{error.path}" if isinstance(error, SchemaError) and error.path else SCHEMA
        why = error.why if isinstance(error, SchemaError) else str(error)
        if form.strict:
            raise RequestError(f"`{path}`: {why}", param=path, code="unsupported_schema") from None
        log.warning("the schema %s is served as any JSON object: `%s`: %s", shorten(form.name), path, why)
        return ANY_OBJECT
    return checked


def held_to(schema: Any, start: Start, served: Served) -> Grammar | None:
    """The grammar of a reply whose content `held_schema` holds to ``schema``."""
    if schema is None:
        return None
    opener, closer = served.text.reasoning or ("", "")
    return Grammar(
        source=json_value(schema), ends=served.text.defaults.eos_ids, start=start, opener=opener, closer=closer
    )


def try_source(source: str, served: Served) -> None:
    """Whether the engine will be able to compile ``source``; it is killed where that takes too long.

    Raises:
        GrammarError: it will not.
    """
    if served.trial is not None:
        served.trial.check(source)


def start_of(prompt: str, in_reasoning: bool, served: Served) -> Start:
    """Where a reply to ``prompt`` begins: its grammar is that of the content."""
    markers = served.text.reasoning
    if in_reasoning:
        return "reasoning"
    if markers is None or prompt.rstrip().endswith(markers[1]):
        return "content"
    return "either"
