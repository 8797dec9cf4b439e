"""Regular expressions of JSON Schema (ECMA-262) in the syntax of the grammar library (Rust's `regex`).

The two share most of their spelling and differ in what it means: white space, `.`, set operations inside classes,
inline flags, what an unknown escape is. So every part of a pattern is read here and written out again in a form that
has one meaning there; what has none is refused.
"""

from __future__ import annotations

import re
from typing import NoReturn

DIGIT, WORD = "0-9", "0-9A-Za-z_"
SPACE = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""White space and line ends of ECMA-262, as the inside of a class."""
ANY = r"[^\n\r\u2028\u2029]"
_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROLS = {"n": r"\n", "r": r"\r", "t": r"\t", "v": r"\x0b", "f": r"\x0c"}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_HEX = (re.compile(r"u\{([0-9a-fA-F]{1,6})\}"), re.compile(r"u([0-9a-fA-F]{4})"), re.compile(r"x([0-9a-fA-F]{2})"))
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
_GROUP = re.compile(r"\?(:|<[A-Za-z_$][A-Za-z0-9_$]*>)")


class PatternError(ValueError):
    """A pattern, or a part of it, that cannot be enforced; the message names the part."""


def translate(pattern: str) -> str:
    """``pattern`` as the library understands it; like the original it may match anywhere in a text.

    Raises:
        PatternError: a look-around, a word boundary, a back reference or whatever else is no regular language, and
            spellings that engines read differently.
    """
    return _Translation(pattern).run()


def literal(char: str) -> str:
    """A character that stands for itself, inside a class or outside."""
    return char if char.isalnum() and char.isascii() else f"\\u{{{ord(char):x}}}"


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0
        self._out: list[str] = []
        self._open = 0
        self._repeatable = False

    def run(self) -> str:
        while self._at < len(self._text):
            self._step(self._take())
        if self._open:
            self._refuse("a group is not closed")
        return "".join(self._out)

    def _step(self, char: str) -> None:
        if char in "*+?{" and self._repeat(char):
            return
        repeatable = True
        match char:
            case "[":
                self._out.append(self._set())
            case "(":
                self._out.append(self._group())
                repeatable = False
            case ")":
                if not self._open:
                    self._refuse("')' closes nothing")
                self._open -= 1
                self._out.append(")")
            case "|" | "^" | "$":
                self._out.append(char)
                repeatable = False
            case ".":
                self._out.append(ANY)
            case "\\":
                self._out.append(self._escape())
            case _:
                self._out.append(literal(char))
        self._repeatable = repeatable

    def _take(self) -> str:
        if self._at == len(self._text):
            self._refuse("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _match(self, form: re.Pattern[str], back: int = 0) -> re.Match[str] | None:
        found = form.match(self._text, self._at - back)
        if found:
            self._at = found.end()
        return found

    def _repeat(self, char: str) -> bool:
        """A quantifier; an opening brace that begins none is a character."""
        count = char
        if char == "{":
            found = self._match(_COUNT, back=1)
            if found is None:
                return False
            count = found.group()
        if not self._repeatable:
            self._refuse(f"{count!r} repeats nothing")
        self._out.append(count)
        if self._text[self._at : self._at + 1] == "?":  # how long a match is does not matter, only whether there is one
            self._at += 1
        self._repeatable = False
        return True

    def _group(self) -> str:
        if self._text[self._at : self._at + 1] == "?" and not self._match(_GROUP):
            self._refuse(f"'({self._text[self._at : self._at + 2]}' is a look-around or a flag")
        self._open += 1
        return "(?:"

    def _escape(self) -> str:
        char = self._take()
        if char.lower() in _CLASSES:
            return f"[{'^' * char.isupper()}{_CLASSES[char.lower()]}]"
        self._at -= 1
        return self._character()

    def _character(self) -> str:
        """What follows a backslash, inside a class or outside, other than a class of its own."""
        for form in _HEX:
            if found := self._match(form):
                return self._code(int(found[1], 16))
        if found := self._match(_PROPERTY):
            return "\\" + found.group()
        char = self._take()
        following = self._text[self._at : self._at + 1]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not following.isdigit():
            return r"\x00"
        if char == "c" and following.isascii() and following.isalpha():
            return literal(chr(ord(self._take()) % 32))
        if char.isalnum() or not char.isascii():
            self._refuse(f"'\\{char}' is not supported")
        return literal(char)

    def _code(self, number: int) -> str:
        if 0xD800 <= number < 0xDC00 and (low := self._match(_LOW_SURROGATE)):
            number = 0x10000 + ((number - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
            self._refuse(f"U+{number:04X} is no character")
        return literal(chr(number))

    def _set(self) -> str:
        """A class; the ``[`` has been read."""
        negated = self._text[self._at : self._at + 1] == "^"
        self._at += negated
        items: list[str] = []
        while (item := self._item()) is not None:
            single, text = item
            ahead = self._text[self._at : self._at + 2]
            if single and ahead[:1] == "-" and ahead[1:] not in ("]", ""):
                self._at += 1
                last = self._item()
                if last is None or not last[0]:
                    self._refuse("a class has a range that does not end in a character")
                text = f"{text}-{last[1]}"
            items.append(text)
        if not items:
            return r"[\u{0}-\u{10ffff}]" if negated else self._refuse("a class is empty")
        return f"[{'^' * negated}{''.join(items)}]"

    def _item(self) -> tuple[bool, str] | None:
        """The next item of a class and whether it is one character; None at the end."""
        char = self._take()
        if char == "]":
            return None
        if char != "\\":
            return True, literal(char)
        name = self._text[self._at : self._at + 1]
        if name and name in "dwsDWS":
            self._at += 1
            inside = _CLASSES[name.lower()]
            return False, f"[^{inside}]" if name.isupper() else inside
        if name == "b":
            self._at += 1
            return True, r"\x08"
        text = self._character()
        return not text.startswith((r"\p", r"\P")), text

    def _refuse(self, why: str) -> NoReturn:
        raise PatternError(f"{why} (near character {self._at})")
