"""A body of `/v1/messages` to a job, by way of the chat request that says the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.job import Job, check_model, check_stream_options, refuse, unsupported
from dgpp_core.server.messages.bodies import MessageTokens
from dgpp_core.server.messages.history import chat_messages
from dgpp_core.server.messages.requests import (
    REFUSED_IF_SET,
    CountMessagesRequest,
    MessagesRequest,
    OutputConfig,
    ToolChoice,
    ToolDefinition,
)
from dgpp_core.server.parse import parse_body, read_fields
from dgpp_core.server.prepare import chat_job, chat_tokens
from dgpp_core.server.reasoning import DOES_NOT_THINK
from dgpp_core.server.requests import ChatRequest, JsonSchemaFormat, ResponseFormat
from dgpp_core.server.served import Served
from dgpp_core.server.translate import Paths, as_chat

FIRST_VERSION = "2023-06-01"
"""The first value of the header `anthropic-version` whose answers have the form that is given here."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
NAMES = {
    "reasoning_effort": "output_config.effort", "thinking_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format", "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip
"""Chat fields and what they are called here."""


def check_version(headers: Mapping[str, str]) -> None:
    """The header `anthropic-version` may be left out; a version before the first one would have other answers.

    Raises:
        RequestError: 400.
    """
    version = headers.get("anthropic-version", FIRST_VERSION)
    if not _DATE.fullmatch(version) or version < FIRST_VERSION:
        what = f"`anthropic-version`: expected a date from {FIRST_VERSION} on, found {version[:40]!r}"
        raise RequestError(what, param="anthropic-version")


def prepare_message(body: bytes, served: Served) -> Job:
    """A request for a message, validated, rendered and tokenized.

    Raises:
        RequestError: whatever is wrong with it.
    """
    request = _read(body, served, MessagesRequest)
    thinking = request.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.budget_tokens >= request.max_tokens:
        what = f"`thinking.budget_tokens`: expected less than `max_tokens` ({request.max_tokens})"
        raise RequestError(what, param="thinking.budget_tokens")
    paths = Paths(NAMES)
    chat = _chat(request, paths, served)
    with paths.renamed():
        job = chat_job(msgspec.structs.replace(chat, max_tokens=request.max_tokens), served)
    return msgspec.structs.replace(job, stops=tuple(request.stop_sequences or ()))


def count_message(body: bytes, served: Served) -> MessageTokens:
    """How long the prompt of a request is.

    Raises:
        RequestError: whatever is wrong with it.
    """
    paths = Paths(NAMES)
    chat = _chat(_read(body, served, CountMessagesRequest), paths, served)
    with paths.renamed():
        return MessageTokens(input_tokens=len(chat_tokens(chat, served)))


def _read(body: bytes, served: Served, form: type[Any]) -> Any:
    raw = parse_body(body)
    check_model(raw, served)
    refuse(raw, (), REFUSED_IF_SET)
    if raw.get("thread") is not None:
        # The client knows this code, and goes on with the whole conversation in each request.
        what = "`thread`: conversations are not kept here; send the whole of it without `thread`"
        raise RequestError(what, param="thread", code="thread_unsupported_request")
    _check_context(raw.get("context_management"))
    check_stream_options(raw, ())
    return read_fields(raw, form)


def _check_context(management: Any) -> None:
    """Nothing is cleared from a conversation here: only to be told so is supported."""
    if management is None:
        return
    edits = management.get("edits") if isinstance(management, Mapping) else None
    if not isinstance(edits, list) or any(map(_clears, edits)):
        raise unsupported("context_management", "`context_management`: nothing can be cleared here")


def _clears(edit: Any) -> bool:
    """Whether an edit is anything but the one that keeps all thinking."""
    if not isinstance(edit, Mapping):
        return True
    return not str(edit.get("type")).startswith("clear_thinking_") or edit.get("keep") != "all"


def _chat(request: CountMessagesRequest, paths: Paths, served: Served) -> ChatRequest:
    choice = request.tool_choice
    return as_chat(
        request,
        messages=chat_messages(request.messages, request.system, paths),
        tools=None if request.tools is None else [_tool(tool, at, paths) for at, tool in enumerate(request.tools)],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(request.output_config),
        reasoning_effort=_effort(request, served),
        thinking_budget=_budget(request, served),
        chat_template_kwargs=_template_kwargs(request, paths, served),
    )


def _tool(tool: ToolDefinition, at: int, paths: Paths) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        path = f"tools[{at}].type"
        raise unsupported(path, f"`{path}`: only tools with an `input_schema` of their own are supported")
    if tool.input_schema is None:
        path = f"tools[{at}].input_schema"
        raise RequestError(f"`{path}` is required", param=path)
    paths.add(f"tools[{at}].parameters", f"tools[{at}].input_schema")
    members = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    given = {name: value for name, value in members.items() if value is not None}
    return {"type": "function", "name": tool.name, **given}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    schema = JsonSchemaFormat(name="output", strict=True, schema=config.format.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _effort(request: CountMessagesRequest, served: Served) -> Any:
    """The effort is advice: it is taken where the model has it and thinking is not turned off."""
    effort = request.output_config.effort if request.output_config is not None else None
    off = request.thinking is not None and request.thinking.type == "disabled"
    return effort if effort in served.efforts and not off else None


def _budget(request: CountMessagesRequest, served: Served) -> int | None:
    """The budget is kept where the engine can end reasoning."""
    thinking = request.thinking
    if thinking is None or thinking.type != "enabled" or served.text.reasoning is None or not served.constrained:
        return None
    return thinking.budget_tokens


def _template_kwargs(request: CountMessagesRequest, paths: Paths, served: Served) -> dict[str, Any] | None:
    """The thinking switch as the template has it; without `thinking` the template decides."""
    given = request.chat_template_kwargs
    if request.thinking is None:
        return given
    wanted = request.thinking.type != "disabled"
    if not served.text.switches.thinking:
        if wanted and served.text.reasoning is None:
            raise unsupported("thinking", f"`thinking`: {DOES_NOT_THINK}", "leave it out")
        if wanted == (served.text.reasoning is not None):
            return given
    # Two names of one switch: the client may have used the first, and then both must say the same.
    name = "thinking" if "enable_thinking" in (given or {}) else "enable_thinking"
    paths.add(f"chat_template_kwargs.{name}", "thinking")
    return {**(given or {}), name: wanted}
