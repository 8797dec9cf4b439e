"""A body of `/v1/responses` to a job, by way of the chat request that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.job import Job, check_model, check_stream_options, refuse, unsupported
from dgpp_core.server.parse import parse_body, read_fields
from dgpp_core.server.prepare import chat_job, chat_tokens
from dgpp_core.server.requests import ChatRequest, JsonSchemaFormat, ResponseFormat
from dgpp_core.server.responses.bodies import Echo, InputTokens, ReasoningEcho, TextEcho
from dgpp_core.server.responses.history import chat_messages
from dgpp_core.server.responses.requests import REFUSED_IF_SET, STREAM_MEMBERS, ResponsesRequest, SchemaFormat
from dgpp_core.server.served import Served
from dgpp_core.server.translate import Paths, as_chat

NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
    "response_format": "text.format", "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice", "tool_choice.custom": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}  # fmt: skip
"""Chat fields and what they are called here."""


def prepare_response(body: bytes, served: Served) -> Job:
    """A request for a response, validated, rendered and tokenized.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request, paths = _read(body, served)
    with paths.renamed():
        job = chat_job(_chat(request, paths), served)
    options = request.stream_options
    return msgspec.structs.replace(
        job,
        obfuscate=options is None or options.include_obfuscation is not False,
        metadata=request.metadata,
        echo=_echo(request),
    )


def count_input(body: bytes, served: Served) -> InputTokens:
    """How long the prompt of a request is.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request, paths = _read(body, served)
    with paths.renamed():
        return InputTokens(input_tokens=len(chat_tokens(_chat(request, paths), served)))


def _read(body: bytes, served: Served) -> tuple[ResponsesRequest, Paths]:
    raw = parse_body(body)
    check_model(raw, served)
    refuse(raw, (), REFUSED_IF_SET)
    check_stream_options(raw, STREAM_MEMBERS)
    request = read_fields(raw, ResponsesRequest)
    _check_extras(request)
    return request, Paths(NAMES)


def _check_extras(request: ResponsesRequest) -> None:
    if request.previous_response_id is not None:
        what = "`previous_response_id`: responses are not kept here; send the conversation so far as `input`"
        raise unsupported("previous_response_id", what)
    if request.store:
        raise RequestError("`store`: nothing is stored here", param="store", code="invalid_parameter")
    if request.background:
        raise unsupported("background", "`background`: responses are not kept here, so none can be fetched later")
    if request.truncation == "auto":
        raise unsupported("truncation", '`truncation` "auto" is not supported: a prompt that does not fit is an error')
    if request.text is not None and request.text.verbosity is not None:
        raise unsupported("text.verbosity", "`text.verbosity` is not supported")
    form = request.text.format if request.text is not None else None
    if form is not None and form.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(form, name) is None:
                raise RequestError(f"`text.format.{name}` is required", param=f"text.format.{name}")


def _chat(request: ResponsesRequest, paths: Paths) -> ChatRequest:
    logprobs = "message.output_text.logprobs" in (request.include or ())
    if request.top_logprobs is not None and not logprobs:
        what = '`top_logprobs` needs "message.output_text.logprobs" in `include`'
        raise RequestError(what, param="top_logprobs")
    return as_chat(
        request,
        messages=chat_messages(request.input, request.instructions, paths),
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs,
        tools=None if request.tools is None else [_tool(raw, at, paths) for at, raw in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice, paths),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format if request.text is not None else None),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _tool(raw: Any, at: int, paths: Paths) -> Any:
    """A tool in its chat form; functions are written the same, without the level that chat has between."""
    if not isinstance(raw, Mapping):
        return raw
    kind = raw.get("type")
    if kind == "custom":
        for chat, own in ((".custom", ""), (".custom.format.grammar", ".format")):
            paths.add(f"tools[{at}]{chat}", f"tools[{at}]{own}")
        return {"type": "custom", "custom": {**raw, "format": _grammar(raw.get("format"))}}
    if kind != "function":
        path = f"tools[{at}].type"
        raise unsupported(path, f'`{path}`: "function" and "custom" are supported here, nothing that a service runs')
    return {key: value for key, value in raw.items() if key != "function"}


def _grammar(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return form
    return {"type": "grammar", "grammar": {key: value for key, value in form.items() if key != "type"}}


def _tool_choice(choice: Any, paths: Paths) -> Any:
    """A choice in its chat form, which has a level more."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": kind, kind: {"name": choice.get("name")}}
    if kind != "allowed_tools":
        return choice
    listed = choice.get("tools")
    if isinstance(listed, list):
        for at in range(len(listed)):
            for member in ("function", "custom"):
                paths.add(f"tool_choice.allowed_tools.tools[{at}].{member}", f"tool_choice.tools[{at}]")
        listed = [_tool_choice(part, paths) for part in listed]
    return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}


def _format(form: SchemaFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    schema = JsonSchemaFormat(name=form.name or "", strict=form.strict, schema=form.schema)
    return ResponseFormat(type=form.type, json_schema=schema)


def _echo(request: ResponsesRequest) -> Echo:
    reasoning, text = request.reasoning, request.text
    return Echo(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        tools=tuple(request.tools or ()),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=TextEcho() if text is None or text.format is None else TextEcho(format=_format_echo(text.format)),
        reasoning=ReasoningEcho(
            effort=reasoning.effort if reasoning is not None else None,
            summary=reasoning.summary if reasoning is not None else None,
        ),
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        seals_reasoning="reasoning.encrypted_content" in (request.include or ()),
    )


def _format_echo(form: SchemaFormat) -> dict[str, Any]:
    members = ("type", "name", "schema", "description", "strict")
    return {name: getattr(form, name) for name in members if getattr(form, name) is not None}
