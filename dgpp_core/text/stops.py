"""Search for strings in text that arrives in pieces, holding back no more than could still begin one."""

from __future__ import annotations


class _Pattern:
    """Knuth-Morris-Pratt: constant work a character on average, however long the string is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fallback = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def advance(self, char: str) -> bool:
        """Take one character; True when the whole string has just been seen. ``state`` is how much of it has."""
        state, text = self.state, self.text
        while state and text[state] != char:
            state = self._fallback[state - 1]
        state += text[state] == char
        self.state = state
        return state == len(text)


class Scanner:
    """Finds the first of several non-empty strings, whatever pieces the text arrives in.

    The match that is complete first wins; of two complete at the same character, the longer.

    Attributes:
        found: the string that was found, empty until then.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(string) for string in strings]
        self._held = ""
        self.found = ""

    def scan(self, text: str) -> tuple[str, str | None]:
        """Take a piece.

        Returns:
            text that is certain to stand before any match, and, once one is found, the text after it. No more may be
            scanned then.
        """
        patterns = self._patterns
        for index, char in enumerate(text):
            found = [pattern for pattern in patterns if pattern.advance(char)]
            if found:
                before = self._held + text[: index + 1]
                self.found = max((pattern.text for pattern in found), key=len)
                self._held = ""
                return before[: -len(self.found)], text[index + 1 :]
        buffer = self._held + text
        cut = len(buffer) - max((pattern.state for pattern in patterns), default=0)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class StopMatcher:
    """Cuts a text at the first stop string. The match and all that follows is never shown.

    Args:
        stops: non-empty strings; none means that all text is shown at once.

    Attributes:
        matched: a stop string was found.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._scanner = Scanner(stops)
        self.matched = False

    def push(self, text: str) -> str:
        """The text that may be shown now."""
        if self.matched:
            return ""
        shown, rest = self._scanner.scan(text)
        self.matched = rest is not None
        return shown

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        return self._scanner.finish()
