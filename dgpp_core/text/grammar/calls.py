"""The grammar of a reply with tool calls, from the rules that its parser goes by too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dgpp_core.text.grammar.dialects import FRAMES, Frame, Term
from dgpp_core.text.grammar.keywords import ANNOTATIONS
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import SPACE, TEXT_OPTIONS, GrammarError, inline_json, slashed
from dgpp_core.text.grammar.sources import lark as client_lark
from dgpp_core.text.grammar.texts import TextError, text_term
from dgpp_core.text.tools.dialect import ToolDialect
from dgpp_core.text.tools.kinds import arguments_schema
from dgpp_core.text.tools.rules import CallRules, Key, Tool

MOST_KEYS = 64
"""Arguments that may come in any order: there is a bit for each. More of them come in the order of the schema."""

_ROOTS = ("$defs", "definitions")
_ARGUMENTS = ANNOTATIONS | {*_ROOTS, "type", "properties", "required", "additionalProperties"}
"""What is enforced of the arguments as a whole, or constrains nothing."""

_WRITABLE = re.compile(r"[^\s<>\"'][^\n\r<>\"']*(?<!\s)|[^\s<>\"']")


class ToolError(ValueError):
    """A promise about a tool's arguments that cannot be kept.

    Attributes:
        tool: its name.
        path: of the keyword, from the schema of its arguments; empty for its grammar.
        why: what is wrong with it.
    """

    def __init__(self, tool: Tool, path: str, why: str) -> None:
        self.tool, self.path, self.why = tool.name, path, why
        super().__init__(f"{tool.name}: {path}: {why}")


class CallGrammar:
    """Rules of the library's Lark dialect for the calls of one request.

    Attributes:
        lines: the rules; ``calls`` is the one to start from.
        nested: grammars of their own, by the name that a rule calls them by.
        weakened: what is not enforced of tools that are not strict, for the log.
    """

    def __init__(self, rules: CallRules, frame: Frame) -> None:
        self.lines: list[str] = []
        self.nested: dict[str, str] = {}
        self.weakened: list[str] = []
        self._frame, self._count = frame, 0
        names = [self._call(tool) for tool in rules.tools]
        self.lines.append(frame.block(f"({' | '.join(names)})", parallel=rules.parallel))
        self.lines += frame.terminals

    def _call(self, tool: Tool) -> str:
        name = self._name("call")
        called = f"{tool.namespace}::{tool.name}" if tool.namespace else tool.name
        self.lines.append(f"{name}: {self._frame.call(called, self._arguments(tool))}")
        return name

    def _arguments(self, tool: Tool) -> str:
        """A term for all arguments of a call: each at most once, and those that may not be missing."""
        if tool.strict:
            _check_parameters(tool)
        keys = [key for key in tool.keys if self._writable(tool, key)]
        needed = {key.name for key in keys if key.required} if tool.strict or self._frame.complete else set()
        items = [(self._argument(tool, key), key.name in needed) for key in keys]
        free = self._free(tool, keys) if tool.open else ""
        if len(items) > MOST_KEYS:
            return " ".join(item + "?" * (not must) for item, must in items) + (f" {free}*" if free else "")
        if not items:
            return f"{free}*" if free else ""
        rule = self._name("keys")
        bits = [f"bit_set({bit})" for bit, (_, must) in enumerate(items) if must]
        done = f" %if {_all(bits)}" if bits else ""
        options = [f'""{done}', *(
            f"{item} {rule}::set_bit({bit}) %if bit_clear({bit})" for bit, (item, _) in enumerate(items)
        )]  # fmt: skip
        if free:
            options.append(f"{free} {rule}::_")
        self.lines.append(f"{rule}::_: " + "\n  | ".join(options))
        return f"{rule}::0x0"

    def _argument(self, tool: Tool, key: Key) -> str:
        rule = self._name("argument")
        self.lines.append(f"{rule}: {self._frame.argument(json.dumps(key.name)[1:-1], self._value(tool, key))}")
        return rule

    def _free(self, tool: Tool, keys: list[Key]) -> str:
        """An argument that is not declared; its name is no declared one."""
        name, rule = self._name("KEY"), self._name("argument")
        taken = "".join(f" & ~{slashed(re.escape(key.name))}" for key in keys)
        self.lines.append(f"{name}: /[A-Za-z0-9_.$-]{{1,64}}/{taken}")
        self.lines.append(f"{rule}: {self._frame.free_argument(name, self._value(tool, tool.other))}")
        return rule

    def _value(self, tool: Tool, key: Key) -> Term:
        if tool.custom and tool.grammar is not None:
            return self._input(tool)
        try:
            return self._typed(tool, key)
        except (SchemaError, TextError) as error:
            if tool.strict:
                inner = f".{error.path}" if isinstance(error, SchemaError) and error.path else ""
                why = error.why if isinstance(error, SchemaError) else str(error)
                raise ToolError(tool, f"properties.{key.name}{inner}", why) from None
            self.weakened.append(f"{tool.name}.{key.name}: {error}")
        return Term.json(inline_json({})) if key.form == "json" else Term.text()

    def _typed(self, tool: Tool, key: Key) -> Term:
        if key.choices is not None and key.form == "text" and not tool.strict:
            return text_term({"enum": list(key.choices)})
        if key.form == "json":
            return Term.json(inline_json(check_schema(_rooted(key.schema, tool.parameters))))
        if not tool.strict:
            return Term.text()
        if key.form == "text":
            return text_term(key.schema)
        kept = sorted(set(key.schema) - ANNOTATIONS - {"type"}) if isinstance(key.schema, dict) else []
        if kept:
            raise TextError(f"a union with strings is only supported without {', '.join(kept)}")
        return Term.text()

    def _input(self, tool: Tool) -> Term:
        grammar = tool.grammar
        assert grammar is not None, "asked for before"
        try:
            if grammar.syntax == "regex":
                return Term.matching(slashed(grammar.definition))
            name = self._name("input")
            self.nested[name] = client_lark(grammar.definition)
        except GrammarError as error:
            raise ToolError(tool, "", str(error)) from None
        return Term.nested(f"@{name}")

    def _writable(self, tool: Tool, key: Key) -> bool:
        if tool.strict and key.schema is False:  # no value conforms; that none is required is checked before
            return False
        if _WRITABLE.fullmatch(key.name):
            return True
        if tool.strict:
            raise ToolError(tool, f"properties.{key.name}", "calls of this model cannot spell this name")
        self.weakened.append(f"{tool.name}.{key.name}: calls of this model cannot spell this name")
        return False

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}" if kind.islower() else f"{kind}_{self._count}"


class ReplySource(msgspec.Struct, frozen=True):
    """The source of a reply that may have calls, and what of its tools it does not enforce."""

    source: str
    weakened: tuple[str, ...] = ()


def reply_source(
    rules: CallRules, dialect: ToolDialect, id_of: Callable[[str], int | None], schema: Any = None
) -> ReplySource:
    """A reply of text and calls; or of calls alone where there has to be one; or of calls or a value.

    Args:
        id_of: ids of the dialect's markers.
        schema: what `check_schema` gave of the value that the reply is if it has no calls; None for free text.

    Raises:
        ToolError: a strict tool or a custom one promises what cannot be kept.
    """
    frame = FRAMES[dialect.name](dialect, id_of)
    grammar = CallGrammar(rules, frame)
    alone = f"GAP? {json.dumps(dialect.lead)} calls" if dialect.lead else "GAP? calls"
    lines = []
    if rules.required:
        lines.append(f"start: {alone}")
    elif schema is None:
        lines.append(f"start: TEXT | {frame.lead} calls")
    else:
        lines += [f"start: value | SPACE value | {alone}", SPACE, f"value: {inline_json(schema)}"]
    text = "\n".join([TEXT_OPTIONS, *lines, *grammar.lines, ""])
    if grammar.nested:
        parts = [{"lark_grammar": text}]
        parts += [{"name": name, "lark_grammar": source} for name, source in grammar.nested.items()]
        text = json.dumps({"grammars": parts})
    return ReplySource(text, tuple(grammar.weakened))


def _check_parameters(tool: Tool) -> None:
    """A strict tool's schema can be enforced, and says nothing of its arguments as a whole but which there are."""
    if tool.parameters is None:
        return
    try:
        check_schema(tool.parameters)
    except SchemaError as error:
        raise ToolError(tool, error.path, error.why) from None
    schema = arguments_schema(tool.parameters)
    if (keyword := next((name for name in schema if name not in _ARGUMENTS), None)) is not None:
        raise ToolError(tool, keyword, "is not supported of the arguments as a whole")
    kinds = schema.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise ToolError(tool, "type", "arguments are an object")
    declared = {key.name for key in tool.keys if key.schema is not False}
    if (missing := next((name for name in schema.get("required", ()) if name not in declared), None)) is not None:
        raise ToolError(tool, "required", f"no argument {missing!r} is declared")


def _rooted(schema: Any, parameters: Any) -> Any:
    """``schema``, a part of ``parameters``, as a schema of its own that its references still lead into."""
    if not isinstance(schema, dict) or not isinstance(parameters, dict):
        return schema
    shared = {name: parameters[name] for name in _ROOTS if name in parameters}
    rooted = {**shared, **schema}
    for reference in _references(rooted):
        if not reference.startswith(tuple(f"#/{name}/" for name in shared)):
            raise TextError(f"{reference!r} does not lead into `$defs`")
    return rooted


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for name, part in node.items():
            if name not in ("enum", "const", "default", "examples"):
                yield from _references(part)
    elif isinstance(node, list):
        for part in node:
            yield from _references(part)


def _all(conditions: list[str]) -> str:
    """All of ``conditions``, of which the library joins two at a time."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = f"and({found}, {condition})"
    return found
