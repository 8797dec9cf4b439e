"""Input items as chat messages: what the model wrote in one turn is one message again."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from dgpp_core.api.errors import RequestError
from dgpp_core.server.job import unsupported
from dgpp_core.server.parse import convert, shorten
from dgpp_core.server.responses.requests import (
    InputCall,
    InputCustomCall,
    InputCustomResult,
    InputFile,
    InputImage,
    InputMessage,
    InputReasoning,
    InputResult,
    InputText,
    Item,
    OutputText,
    Part,
    Refusal,
)
from dgpp_core.server.translate import CallOrder, Paths

KINDS: Mapping[str, type[Any]] = {kind.__struct_config__.tag: kind for kind in get_args(Item)}
SEALED = "dgpp1."
"""Begins the `encrypted_content` of our own reasoning items: text that clients hand back without looking into it."""


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`. Nothing is secret about it."""
    return SEALED + base64.b64encode(text.encode()).decode()


def chat_messages(items: str | Sequence[Any], instructions: str | None, paths: Paths) -> list[dict[str, Any]]:
    """The chat messages of ``items``, behind a system message with ``instructions``.

    Args:
        paths: notes which item each message was made from.

    Raises:
        RequestError: 400 with the path of what is wrong.
    """
    history = _History(paths)
    if instructions:
        history.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(items, str):
        history.add({"role": "user", "content": items}, "input")
    else:
        for at, raw in enumerate(items):
            history.take(_item(raw, f"input[{at}]"), f"input[{at}]")
    history.end_results()
    return history.messages


def _item(raw: Any, path: str) -> Item:
    if not isinstance(raw, Mapping):
        raise RequestError(f"`{path}`: expected an object, found {shorten(raw)}", param=path)
    kind = raw.get("type")
    if kind is None and "role" in raw:
        kind = "message"
    form = KINDS.get(kind) if isinstance(kind, str) else None
    if form is None:
        known = ", ".join(KINDS)
        raise unsupported(f"{path}.type", f"`{path}.type`: expected one of {known}, found {shorten(kind)}")
    found: Item = convert(path, {**raw, "type": kind}, form)
    return found


class _History:
    """Messages as they are put together."""

    def __init__(self, paths: Paths) -> None:
        self.messages: list[dict[str, Any]] = []
        self._paths = paths
        self._calls = CallOrder()
        self._results: list[tuple[str, tuple[dict[str, Any], str]]] = []

    def add(self, message: dict[str, Any], path: str) -> None:
        """A message of its own."""
        at = f"messages[{len(self.messages)}]"
        self._paths.add(at, path)
        self._paths.add(f"{at}.content", f"{path}.content" if path.startswith("input[") else path)
        self.messages.append(message)

    def take(self, item: Item, path: str) -> None:
        """The next item."""
        if isinstance(item, InputResult | InputCustomResult):
            self._calls.check(item.call_id, f"{path}.call_id")
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            self._results.append((item.call_id, (result, path)))
            return
        self.end_results()
        if isinstance(item, InputReasoning):
            if text := _reasoning(item):
                turn = self._turn(path, fresh=("content", "tool_calls"))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif isinstance(item, InputCall | InputCustomCall):
            self._call(item, path)
        elif item.role == "assistant":
            self._said(item, path)
        else:
            self.add({"role": item.role, "content": _content(item.content)}, path)
            self._add_members(self.messages[-1]["content"], f"{path}.content")

    def end_results(self) -> None:
        """Give out results, which stand together, in the order of their calls."""
        results, self._results = self._results, []
        for message, path in self._calls.sort(results):
            self.add(message, path)
            self._paths.add(f"messages[{len(self.messages) - 1}].content", f"{path}.output")
            self._add_members(message["content"], f"{path}.output")

    def _add_members(self, content: Any, path: str) -> None:
        """Note where the members of images and files of the last message stand, which chat keeps a level deeper."""
        for at, part in enumerate(content if isinstance(content, list) else ()):
            chat, own = f"messages[{len(self.messages) - 1}].content[{at}]", f"{path}[{at}]"
            if part["type"] == "image_url":
                for member in ("", ".url"):
                    self._paths.add(f"{chat}.image_url{member}", f"{own}.image_url")
                for member in (".file_id", ".detail"):
                    self._paths.add(f"{chat}.image_url{member}", own + member)
            elif part["type"] == "file":
                self._paths.add(f"{chat}.file", own)

    def _turn(self, path: str, *, fresh: Sequence[str] = ()) -> dict[str, Any]:
        """The model's turn that is being put together, or a new one where that has ``fresh`` already."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(member) for member in fresh):
            self.add({"role": "assistant", "content": ""}, path)
        return self.messages[-1]

    def _said(self, item: InputMessage, path: str) -> None:
        """Text behind text is another turn, unless calls stand between: a reply may go on after them."""
        last = self.messages[-1] if self.messages else {}
        turn = self._turn(path, fresh=() if last.get("tool_calls") else ("content",))
        self._paths.add(f"messages[{len(self.messages) - 1}].content", f"{path}.content")
        parts = item.content if isinstance(item.content, list) else [OutputText(text=item.content)]
        turn["content"] += "".join(_written(part, f"{path}.content[{at}]") for at, part in enumerate(parts))

    def _call(self, item: InputCall | InputCustomCall, path: str) -> None:
        self._calls.add(item.call_id)
        calls = self._turn(path).setdefault("tool_calls", [])
        at = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self._paths.add(at, path)
        for member in ("function", "custom"):
            self._paths.add(f"{at}.{member}", path)
        if isinstance(item, InputCall):
            body = {"type": "function", "function": {"name": item.name, "arguments": item.arguments or "{}"}}
        else:
            body = {"type": "custom", "custom": {"name": item.name, "input": item.input}}
        calls.append({"id": item.call_id, **body})


def _content(content: str | Sequence[Part]) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, InputText | OutputText):
        return {"type": "text", "text": part.text}
    if isinstance(part, Refusal):
        return {"type": "refusal", "refusal": part.refusal}
    if isinstance(part, InputImage):
        detail = "high" if part.detail == "original" else part.detail
        body = {"url": part.image_url, "detail": detail, "file_id": part.file_id}
        return {"type": "image_url", "image_url": {key: value for key, value in body.items() if value is not None}}
    assert isinstance(part, InputFile)
    names = ("file_data", "file_id", "file_url", "filename")
    return {"type": "file", "file": {name: getattr(part, name) for name in names if getattr(part, name) is not None}}


def _written(part: Part, path: str) -> str:
    """The text of a part that the model wrote."""
    if isinstance(part, InputText | OutputText):
        return part.text
    if isinstance(part, Refusal):
        return part.refusal
    what = f"`{path}.type`: the assistant's content is text, found {part.__struct_config__.tag}"
    raise RequestError(what, param=f"{path}.type", code="unsupported_content_type")


def _reasoning(item: InputReasoning) -> str:
    """What was reasoned; nothing where that cannot be read here, because another service sealed it."""
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content and item.encrypted_content.startswith(SEALED):
        try:
            return base64.b64decode(item.encrypted_content.removeprefix(SEALED), validate=True).decode()
        except ValueError:  # it is no base64, or no text
            return ""
    return ""
