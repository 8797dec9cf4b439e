"""How calls are written in each dialect, as terms of the library's Lark dialect. The inverse of `text.tools`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import msgspec

from dgpp_core.text.tools.dialect import ToolDialect

_ANY = "/(?s:.*)/"


class Term(msgspec.Struct, frozen=True):
    """What a value may be.

    Attributes:
        body: a rule's term; for text, what a terminal is made of.
    """

    kind: Literal["text", "json", "nested"]
    body: str

    @classmethod
    def text(cls) -> Term:
        """Any raw text."""
        return cls("text", _ANY)

    @classmethod
    def matching(cls, regex: str) -> Term:
        """Raw text that matches a terminal's expression as a whole."""
        return cls("text", f"{_ANY} & {regex}")

    @classmethod
    def json(cls, body: str) -> Term:
        """A JSON text."""
        return cls("json", body)

    @classmethod
    def nested(cls, body: str) -> Term:
        """Raw text of a grammar of its own."""
        return cls("nested", body)


class Frame(ABC):
    """What stands around names, keys and values.

    Args:
        dialect: whose calls these are.
        id_of: ids of its markers.

    Attributes:
        complete: required arguments may not be missing even of tools that are not strict.
        lead: a term for free text up to a block.
        terminals: lines that the other terms refer to.
    """

    lead = "TEXT"

    def __init__(self, dialect: ToolDialect, id_of: Callable[[str], int | None]) -> None:
        self.complete = dialect.always_complete
        self.marks = [f"<[{id_of(marker)}]>" for marker in dialect.markers]
        self.terminals: list[str] = [f"TEXT: {_ANY}", r"GAP: /[ \n]{1,3}/"]
        self._count = 0

    @abstractmethod
    def block(self, call: str, *, parallel: bool) -> str:
        """The rule ``calls``: a block of calls, or several."""

    @abstractmethod
    def call(self, name: str, arguments: str) -> str:
        """One call."""

    @abstractmethod
    def argument(self, key: str, value: Term) -> str:
        """An argument whose key is the inside of a JSON string."""

    @abstractmethod
    def free_argument(self, key: str, value: Term) -> str:
        """An argument whose key is the terminal ``key``."""

    def _closed(self, value: Term, closer: str, forbidden: str) -> str:
        """A value and the text ``closer`` behind it; raw text has no ``forbidden`` in it."""
        if value.kind != "text":
            return f"{value.body} {json.dumps(closer)}"
        self._count += 1
        body, whole, rule = f"BODY_{self._count}", f"WHOLE_{self._count}", f"raw{self._count}"
        self.terminals += [
            f"{body}: {value.body} & ~/(?s:.*){forbidden}(?s:.*)/",
            f"{whole}: {body} {json.dumps(closer)}",
            f"{rule}[lazy]: {whole}",
        ]
        return rule


class GlmFrame(Frame):
    """Every boundary is a control token."""

    def block(self, call: str, *, parallel: bool) -> str:
        return f"calls: {call} (GAP? {call})*" if parallel else f"calls: {call}"

    def call(self, name: str, arguments: str) -> str:
        return f"{self.marks[0]} {json.dumps(name)} {arguments} {self.marks[1]}"

    def argument(self, key: str, value: Term) -> str:
        return self._pair(f'"{key}"', value)

    def free_argument(self, key: str, value: Term) -> str:
        return self._pair(key, value)

    def _pair(self, key: str, value: Term) -> str:
        _, _, opened, closed, begin, end = self.marks
        if value.kind != "text":
            return f"{opened} {key} {closed} {begin} {value.body} {end}"
        self._count += 1
        self.terminals.append(f"BODY_{self._count}: {value.body}")
        return f"{opened} {key} {closed} {begin} BODY_{self._count} {end}"


class XmlFrame(Frame):
    """Tags that are text inside a block between control tokens; ``line`` is what stands around values."""

    line = ""

    def block(self, call: str, *, parallel: bool) -> str:
        return f"calls: {call} (GAP? {call})*" if parallel else f"calls: {call}"

    def call(self, name: str, arguments: str) -> str:
        opened = json.dumps(f"{self.line}<function={name}>{self.line}")
        return f"{self.marks[0]} {opened} {arguments} {json.dumps(f'</function>{self.line}')} {self.marks[1]}"

    def argument(self, key: str, value: Term) -> str:
        return f'"<parameter={key}>{json.dumps(self.line)[1:-1]}" {self._end(value)}'

    def free_argument(self, key: str, value: Term) -> str:
        return f'"<parameter=" {key} {json.dumps(f">{self.line}")} {self._end(value)}'

    def _end(self, value: Term) -> str:
        return self._closed(value, f"{self.line}</parameter>{self.line}", r"<\/parameter>")


class QwenFrame(XmlFrame):
    """Values on lines of their own."""

    line = "\n"


class DsmlFrame(Frame):
    """Tags whose names begin with a control token, which so ends the text before it."""

    lead = "LED"

    def __init__(self, dialect: ToolDialect, id_of: Callable[[str], int | None]) -> None:
        super().__init__(dialect, id_of)
        self.terminals.append("LED: /(?s:.*)</")

    def block(self, call: str, *, parallel: bool) -> str:
        # One terminal a gap: two that begin alike could not be told apart where a control token cuts them.
        calls = f'{call} ("\\n<" {call})*' if parallel else call
        return f'calls: {self.marks[0]} " calls>\\n<" {calls} "\\n</" {self.marks[0]} " calls>"'

    def call(self, name: str, arguments: str) -> str:
        mark = self.marks[0]
        opened = json.dumps(f' invoke name="{name}">\n')
        return f'{mark} {opened} {arguments} "</" {mark} " invoke>"'

    def argument(self, key: str, value: Term) -> str:
        return self._tagged(f'" parameter name=\\"{key}\\" ', value)

    def free_argument(self, key: str, value: Term) -> str:
        return f'"<" {self.marks[0]} " parameter name=\\"" {key} {self._rest(chr(92) + chr(34) + " ", value)}'

    def _tagged(self, opened: str, value: Term) -> str:
        return f'"<" {self.marks[0]} {self._rest(opened, value, quoted=True)}'

    def _rest(self, opened: str, value: Term, *, quoted: bool = False) -> str:
        marked = "false" if value.kind == "json" else "true"
        start = opened if quoted else f'"{opened}'
        tag = f'{start}string=\\"{marked}\\">"'
        end = f'{self.marks[0]} " parameter>\\n"'
        if value.kind != "text":
            return f'{tag} {value.body} "</" {end}'
        self._count += 1
        body, whole = f"BODY_{self._count}", f"WHOLE_{self._count}"
        self.terminals += [f"{body}: {value.body}", f'{whole}: {body} "</"']
        return f"{tag} {whole} {end}"


FRAMES: dict[str, type[Frame]] = {"glm": GlmFrame, "qwen": QwenFrame, "compact": XmlFrame, "dsml": DsmlFrame}
"""By the name of the dialect."""
