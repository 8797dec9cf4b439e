"""Chat templates: the checkpoint's Jinja source in a sandbox, with the functions that such templates use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dgpp_core.api.errors import RequestError, TokenizerError

ROLES = ("system", "user", "assistant", "tool")
_PROBE = "qZ7probe"


class ChatTemplate:
    """A compiled chat template. Rendering is pure but for the clock that ``strftime_now`` reads.

    Args:
        source: Jinja source, as `transformers` takes it.
        special_tokens: ``bos_token`` and the like, which the template may name.
        clock: the time of ``strftime_now``.
        name: where the source came from, for messages.

    Raises:
        TokenizerError: the source does not compile.

    Attributes:
        name: as given.
        variables: top-level variables that the template reads and does not define itself.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], datetime] | None = None,
        name: str = "chat template",
    ) -> None:
        self.name = name
        environment = _environment(clock or datetime.now)
        try:
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise TokenizerError(
                "the chat template does not compile",
                where=name + (f": line {line}" if line else ""),
                found=str(error),
                expected="a Jinja template",
                hint="fetch the file again",
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = {},
    ) -> str:
        """The prompt, ending where the assistant's turn begins.

        Args:
            messages: as `normalise_messages` makes them.
            tools: tool definitions, or None.
            kwargs: further variables, such as ``enable_thinking``.

        Raises:
            RequestError: the template refuses the conversation; it carries the template's own message.
        """
        variables = self._special_tokens | dict(kwargs)
        variables |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(variables)
        except Exception as error:  # a template can fail in any way that Python can
            own = isinstance(error, jinja2.TemplateError)
            message = str(error) if own else f"{type(error).__name__}: {error}"
            raise RequestError(
                f"the chat template does not accept these messages: {message}",
                param="messages",
                hint="the model's template has its own rules for roles, their order and their content",
            ) from error

    @cached_property
    def part_roles(self) -> frozenset[str]:
        """Roles for which the template takes content as a list of text parts, found by trying."""
        return frozenset(role for role in ROLES if self._takes(role, [{"type": "text", "text": _PROBE}]))

    @cached_property
    def string_list_roles(self) -> frozenset[str]:
        """Roles for which the template takes content as a list of bare strings, found by trying."""
        return frozenset(role for role in ROLES if self._takes(role, [_PROBE]))

    def _takes(self, role: str, content: list[Any]) -> bool:
        """Whether ``content`` comes out as the same content in one string does."""
        try:
            return self.render(_conversation(role, content)) == self.render(_conversation(role, _PROBE))
        except RequestError:
            return False


def _conversation(role: str, content: Any) -> list[dict[str, Any]]:
    """A short conversation in which ``role`` says ``content``."""
    user = {"role": "user", "content": "x"}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    before: dict[str, list[dict[str, Any]]] = {
        "system": [],
        "user": [],
        "assistant": [user],
        "tool": [user, {"role": "assistant", "content": "", "tool_calls": [call]}],
    }
    message = {"role": role, "content": content} | ({"tool_call_id": "call_1"} if role == "tool" else {})
    after = [user] if role in ("system", "assistant") else []
    return [*before[role], message, *after]


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's own text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model has been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
