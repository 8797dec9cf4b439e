"""Whether every rule of a Lark grammar has a finite text: a reply that enters one without would never end."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

_TOKEN = re.compile(
    r"""(?://|\#)[^\n]*|"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[imslux]*|%\w+|->|[A-Za-z_][\w-]*|[0-9]+|\.\.|\S"""
)

ROUNDS = 64
"""Rules that may lead on to rules in front of them, one after the other."""


def endless_rule(definition: str) -> str | None:
    """The name of a rule that has no finite text, if there is one. What is malformed is left to the compiler."""
    rules = _rules(definition)
    known: set[str] = set()
    waiting = list(rules)[::-1]  # what a rule is made of mostly comes after it
    for _ in range(ROUNDS):
        before = len(known)
        for name in waiting:
            if _Body(rules[name], known, rules).ends():
                known.add(name)
        waiting = [name for name in waiting if name not in known]
        if not waiting or len(known) == before:
            break
    return waiting[-1] if waiting else None


def _rules(definition: str) -> Mapping[str, list[str]]:
    """The tokens behind each rule's name. A terminal cannot be recursive, so it is none."""
    tokens = [found for found in _TOKEN.findall(definition) if not found.startswith(("//", "#"))]
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if following == ":" and token[0].isalpha() | (token[0] == "_"):
            body = rules.setdefault(token, []) if token[0].islower() or token[0] == "_" else []
        elif token.startswith("%"):
            body = []
        else:
            body.append(token)
    return {name: found[1:] for name, found in rules.items()}


class _Body:
    """Reads the alternatives of one rule."""

    def __init__(self, tokens: list[str], known: Container[str], rules: Container[str]) -> None:
        self._tokens, self._known, self._rules, self._at = tokens, known, rules, 0

    def ends(self) -> bool:
        """Whether one of the alternatives has a finite text, as far as is known."""
        found = self._sequence()
        while self._next() == "|":
            self._at += 1
            found = self._sequence() or found
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _sequence(self) -> bool:
        found = True
        while self._next() not in ("", "|", ")", "]"):
            found = self._item() and found
        return found

    def _item(self) -> bool:
        token = self._next()
        self._at += 1
        found = token not in self._rules or token in self._known
        if token in ("(", "["):
            found = self.ends() or token == "["
            self._at += 1
        elif token == "->":
            self._at += 1
        while (more := self._next()) in ("*", "?", "~", "{"):
            self._at += 1
            if more in ("~", "{"):
                more = "*" if self._next() in ("0", ",") else more
                while self._next() and re.fullmatch(r"[0-9]+|\.\.|,|\}", self._next()):
                    self._at += 1
            found = found or more in ("*", "?")
        return found
