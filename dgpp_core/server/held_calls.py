"""The grammar of tool calls, and what is wrong with a tool for which there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.server.served import Served
from dgpp_core.text.grammar.calls import ToolError, reply_source
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.trial import TOO_MUCH
from dgpp_core.text.tools.rules import CallRules, Tool

log = logging.getLogger("dgpp.request")


def call_source(rules: CallRules, schema: Any, tools: Sequence[Any], served: Served) -> str | None:
    """The source of a reply that may have calls, and else is free or conforms to ``schema``.

    Where nothing is promised and no grammar can be had, there is none, and calls are read as they come.

    Raises:
        RequestError: 400, what is promised of a tool cannot be kept.
    """
    try:
        return _source(rules, schema, tools, served)
    except GrammarError:
        pass
    kept = _compiling(rules.tools, tools, served)
    try:
        return _source(msgspec.structs.replace(rules, tools=kept), schema, tools, served)
    except GrammarError as error:
        if schema is None and not rules.required and rules.parallel and not any(tool.strict for tool in kept):
            log.warning("tool calls are not held to their tools: %s", error)
            return None
        raise _refused("tools", str(error), "unsupported_schema") from None


def _source(rules: CallRules, schema: Any, tools: Sequence[Any], served: Served) -> str:
    dialect = served.text.tools
    assert dialect is not None, "rules come from a dialect"
    try:
        found = reply_source(rules, dialect, served.text.tokenizer.id_of, schema)
    except ToolError as error:
        raise _of_tool(rules.tool(error.tool), error.path, error.why, tools) from None
    for note in found.weakened:
        log.warning("not enforced in tool calls: %s", note)
    served.try_source(found.source)
    return found.source


def _compiling(given: Sequence[Tool], tools: Sequence[Any], served: Served) -> tuple[Tool, ...]:
    """Each tool if it can be compiled by itself, or else held to the types of its arguments alone.

    One tool may take the time that there is for a grammar; after that only those that promise something are tried.
    """
    kept: list[Tool] = []
    slow = ""
    for tool in given:
        error = slow if slow and not tool.strict else _error_of(tool, tools, served)
        if error and tool.strict:
            raise _of_tool(tool, _path_in(tool, served), error, tools)
        kept.append(_plain(tool, error) if error else tool)
        if error.startswith(TOO_MUCH):
            slow = f"{tool.name} has taken the time that there is for the grammars of a request's tools"
    return tuple(kept)


def _error_of(tool: Tool, tools: Sequence[Any], served: Served) -> str:
    try:
        _source(CallRules(tools=(tool,), required=True), None, tools, served)
    except GrammarError as error:
        return str(error)
    return ""


def _plain(tool: Tool, why: str) -> Tool:
    log.warning("arguments of %s are held to their types alone: %s", tool.name, why)
    plain = [
        msgspec.structs.replace(key, schema={"type": sorted(key.types)} if key.types else {}, choices=None)
        for key in tool.keys
    ]
    return msgspec.structs.replace(tool, keys=tuple(plain))


def _path_in(tool: Tool, served: Served) -> str:
    """The keyword of a tool's schema that does not compile; empty where that is not known."""
    if tool.custom:
        return ""
    try:
        return served.refused_path(tool.parameters, check_schema(tool.parameters))
    except SchemaError as error:
        return error.path


def _of_tool(tool: Tool, path: str, why: str, tools: Sequence[Any]) -> RequestError:
    """400 on the part of the request that ``path``, in the schema of the tool's arguments, comes from."""
    at, raw = next((at, raw) for at, raw in enumerate(tools) if _name(raw) == tool.name)
    if tool.custom:
        return _refused(f"tools[{at}].custom.format.grammar", why, "invalid_grammar")
    place = f"tools[{at}]{'.function' if 'function' in raw else ''}.parameters"
    return _refused(f"{place}.{path}" if path else place, why, "unsupported_schema")


def _name(raw: Mapping[str, Any]) -> Any:
    body = raw.get("custom") if raw.get("type") == "custom" else raw.get("function", raw)
    return body.get("name") if isinstance(body, Mapping) else None


def _refused(param: str, why: str, code: str) -> RequestError:
    return RequestError(f"`{param}`: {why}", param=param, code=code)
